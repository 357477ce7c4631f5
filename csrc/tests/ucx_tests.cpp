// Tests of links through UCX on a UCX of the tests, whose requests end when a test says so.
#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "check.hpp"
#include "fake_ucx.hpp"
#include "team.hpp"

namespace {

// A notice has arrived, and nobody has polled it, when the connection breaks while the link ends:
// it must not listen for another one, which would come into memory that is gone.
void a_link_that_ends_listens_no_more() {
    Pair pair;
    pair.link->give_up({-1, syncline::Fault::lost});
    Request* notice = pair.ucx.receiving_notice;
    pair.notice({.word = taken});
    pair.ucx.on_progress = [&] {
        pair.ucx.on_error.cb(pair.ucx.on_error.arg, nullptr, UCS_ERR_CONNECTION_RESET);
        pair.ucx.end_all(UCS_ERR_CONNECTION_RESET);
    };
    pair.link.reset();
    CHECK(pair.ucx.receiving_notice == notice && notice->freed);
    CHECK(pair.ucx.freed_in_progress == 0);
}

// A peer takes nothing any more: what was sent to it is cut off, and not read when it is gone.
void what_is_not_through_is_cut_off() {
    Pair pair;
    const std::array<std::byte, 100> data{};
    pair.link->send(data.data(), data.size(), {}, false, std::nullopt);
    pair.link.reset();
    CHECK(pair.ucx.forced && pair.ucx.freed_in_progress == 0);
}

// Closing may reset the connection, and a peer that finds it reset reads no notice any more.
void a_rank_that_gives_up_waits_until_the_peer_knows() {
    Pair pair;
    CHECK(pair.link->ended());
    pair.link->give_up({2, syncline::Fault::lost});
    pair.link->end();
    CHECK(!pair.link->ended());
    pair.ucx.on_error.cb(pair.ucx.on_error.arg, nullptr, UCS_ERR_CONNECTION_RESET);
    CHECK(pair.link->ended());
}

void what_is_through_is_closed_in_peace() {
    Pair pair;
    pair.ucx.on_progress = [&] { pair.ucx.end_all(UCS_OK); };
    pair.link.reset();
    CHECK(!pair.ucx.forced && pair.ucx.flush->freed && pair.ucx.freed_in_progress == 0);
}

void what_no_rank_says_is_refused() {
    const auto refused_notice = [](const Notice& said, ucs_status_t status = UCS_OK) {
        Pair pair;
        send_some(pair, 3);
        pair.notice(said, status);
        return pair.refusal().starts_with("rank 1 is faulty: expected ");
    };
    CHECK(!refused_notice({.word = taken, .taken = 3}));
    CHECK(!refused_notice({.word = given_up, .culprit = 7}));  // the group knows how many there are
    CHECK(refused_notice({.word = taken, .taken = 4}));
    CHECK(refused_notice({.word = taken, .taken = ~std::uint64_t{0}}));
    CHECK(refused_notice({.word = taken, .taken_messages = 1}));
    CHECK(refused_notice({.word = 0}));
    CHECK(refused_notice({.word = 5}));
    CHECK(refused_notice({.word = given_up, .fault = 3}));
    CHECK(refused_notice({.word = taken}, UCS_ERR_MESSAGE_TRUNCATED));

    const auto refused_fragment = [](const Call& call, std::size_t bytes) {
        Pair pair;
        CHECK(pair.arrive(call, bytes) == UCS_OK);
        return pair.refusal().starts_with("rank 1 is faulty: expected a fragment of at most 4096");
    };
    const auto none = static_cast<syncline::Dtype>(99);
    CHECK(!refused_fragment({.count = 10}, 40));
    CHECK(refused_fragment({.count = 10}, 4097));
    CHECK(refused_fragment({.count = 10, .dtype = none}, 40));
    CHECK(refused_fragment({.count = 10, .collective = 9}, 40));
    CHECK(refused_fragment({.count = std::uint64_t{1} << 62}, 40));
    Pair pair;
    std::byte any[8]{};
    CHECK(pair.arrive(any, 0, any, 1) == UCS_OK && pair.refusal().empty());  // a greeting
    CHECK(pair.arrive(any, 8, any, 1) == UCS_OK && !pair.refusal().empty());
}

// A rank waits for acknowledgements: one that does not would fill this rank's memory.
void a_peer_that_does_not_wait_is_refused() {
    for (const std::uint8_t collective : {std::uint8_t{0}, syncline::exchange}) {
        Pair pair;
        const Call call{.count = 10, .collective = collective};
        for (std::size_t i = 0; i < most_ahead; ++i) {
            CHECK(pair.arrive(call, 40) == UCS_OK);
            CHECK(pair.refusal().empty());
        }
        CHECK(pair.arrive(call, 40) == UCS_OK);
        CHECK(pair.refusal().starts_with("rank 1 is faulty: expected at most 32 fragments ahead"));
    }
}

// A peer may offer nothing to be fetched, as if it were long, to a rank that takes nothing: its
// memory is at no address then.
void an_offer_of_nothing_is_taken_at_once() {
    for (const std::uint8_t collective : {std::uint8_t{0}, syncline::exchange}) {
        Pair pair;
        syncline::Link& link = collective == 0 ? *pair.link : *pair.link->messages();
        const Call call{.collective = collective};
        std::byte offer{};
        CHECK(pair.arrive(&call, sizeof call, &offer, 0, true) == UCS_OK);
        link.receive({nullptr, nullptr, 0}, call);
        CHECK(link.received() == 1 && pair.refusal().empty());
    }
}

// UCX is written in C: no exception may pass through it.
void memory_that_runs_out_in_a_callback_is_an_error() {
    const auto thrown = [](Pair& pair, const std::function<void()>& call_back) {
        memory_left = 0;
        call_back();
        memory_left = -1;
        try {
            pair.worker->progress();
        } catch (const std::bad_alloc&) {
            pair.worker->progress();  // reported once
            return true;
        }
        return false;
    };
    Pair pair;
    const Call call{.count = 1000};
    std::vector<std::byte> data(4000);
    for (const bool held : {true, false}) {
        CHECK(thrown(pair, [&] {
            while (memory_left == 0 &&  // as long as the queue has room left
                   pair.arrive(&call, sizeof call, data.data(), data.size(), held) ==
                       UCS_INPROGRESS) {
            }
        }));
    }
    CHECK(thrown(pair, [&] {
        pair.ucx.on_error.cb(pair.ucx.on_error.arg, nullptr, UCS_ERR_CONNECTION_RESET);
    }));
    // Nor may one leave a destructor.
    pair.ucx.on_progress = [&] { pair.ucx.end_all(UCS_OK); };
    memory_left = 0;
    pair.link.reset();
    memory_left = -1;
}

// The group's error says so, and each rank gets it.
void a_group_whose_memory_runs_out_says_so() {
    Pair pair;
    std::vector<std::unique_ptr<syncline::Link>> links(2);
    links[1] = std::move(pair.link);
    Group group(0, std::move(links), std::make_unique<EventSleeper>(pair.worker, nullptr, -1),
                pair.worker, {});
    std::vector<float> work(10);
    const Handle handle =
        group.start(request<float>(direct(2), 0, 2, work, std::span<float>(work)), true);
    const Call call{.count = 10};
    std::vector<std::byte> data(20);
    bool come = false;
    pair.ucx.on_progress = [&] {
        if (std::exchange(come, true)) return;
        memory_left = 0;
        (void)pair.arrive(&call, sizeof call, data.data(), data.size());
        memory_left = -1;
    };
    const Outcome end = outcome([&] { group.wait(handle, soon()); });
    CHECK(end.rank == -1 && says(end, "rank 0 cannot go on: std::bad_alloc"));
    pair.ucx.on_progress = [&] { pair.ucx.end_all(UCS_OK); };
    group.close();
}

}  // namespace

int main() {
    a_link_that_ends_listens_no_more();
    what_is_not_through_is_cut_off();
    a_rank_that_gives_up_waits_until_the_peer_knows();
    what_is_through_is_closed_in_peace();
    what_no_rank_says_is_refused();
    a_peer_that_does_not_wait_is_refused();
    an_offer_of_nothing_is_taken_at_once();
    memory_that_runs_out_in_a_callback_is_an_error();
    a_group_whose_memory_runs_out_says_so();
    if (failed > 0) return 1;
    std::puts("ucx tests passed");
    return 0;
}
