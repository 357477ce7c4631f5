// A peer whose memory is damaged, or that is hostile: whatever it says, the others go on or report
// it, before their deadline, and leave the group.
//
// `syncline_fuzz_tests [seconds [words of a kind [seed]]]`: how long, 6 by default; the rest is to
// repeat what failed.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "fake_ucx.hpp"
#include "team.hpp"
#include "ucx_link.hpp"

namespace {

constexpr milliseconds patience{300};
// A busy machine takes its time; a rank that hangs takes for ever.
constexpr seconds far_too_long{60};

template <typename T>
T one_of(Random& random, std::initializer_list<T> values) {
    return *(values.begin() + uniform<std::size_t>(random, 0, values.size() - 1));
}

std::uint64_t any_word(Random& random, std::uint64_t before) {
    switch (uniform(random, 0, 5)) {
        case 0:
            return random();
        case 1:
            return uniform<std::uint64_t>(random, 0, 64);
        case 2:
            return before + uniform<std::uint64_t>(random, 0, 6) - 3;
        case 3:
            return before ^ std::uint64_t{1} << uniform(random, 0, 63);
        case 4:
            return ~uniform<std::uint64_t>(random, 0, 3);
        default:
            return one_of<std::uint64_t>(random, {0, 0x7fff'ffff, 0x8000'0000, 1ULL << 32,
                                                  1ULL << 47, 1ULL << 63, 0x7fff'ffff'ffff'ffff});
    }
}

// Collectives and messages until one fails, then the end of the group.
void take_part(Group& group, std::uint64_t seed) {
    Random agreed(seed);  // the same on all ranks
    const std::int32_t ranks = group.ranks();
    const std::int32_t rank = group.rank();
    const std::vector<Shape> all = shapes(ranks);
    std::vector<std::vector<float>> memory;
    memory.reserve(64);
    std::vector<std::shared_ptr<syncline::Task>> begun;
    Outcome end;
    for (int round = 0; round < 16 && end.rank == -2; ++round) {
        const Shape& shape = all[agreed() % all.size()];
        const std::size_t count = one_of<std::size_t>(agreed, {1, 60, 300, 1500, 5000});
        const bool messages = agreed() % 3 == 0;
        const std::uint32_t tag = agreed() % 2;
        end = outcome([&] {
            if (messages && agreed() % 2 == 0) {
                for (std::int32_t peer = 0; peer < ranks; ++peer) {
                    if (peer == rank) continue;
                    for (const bool sends : {true, false}) {
                        const auto post = message(tag, peer, memory.emplace_back(count), sends);
                        sends ? group.send(post) : group.receive(post);
                        begun.push_back(post);
                    }
                }
            } else {
                const std::span<float> work = memory.emplace_back(count);
                begun.push_back(
                    group.start(request<float>(shape, rank, ranks, work, work), agreed() % 2 == 0));
            }
            if (memory.size() > 50 || agreed() % 2 == 0) {
                for (const auto& each : begun) group.wait(each, Clock::now() + patience);
                begun.clear();
                memory.clear();
            }
        });
    }
    group.close();
}

void in_time(std::uint64_t seed, const char* what, const std::function<void()>& run) {
    const auto began = Clock::now();
    const int before = failed;
    run();
    CHECK(Clock::now() - began < far_too_long);
    if (failed != before) {
        std::fprintf(stderr, "%s: seed %llu\n", what, static_cast<unsigned long long>(seed));
    }
}

#if !defined(__SANITIZE_THREAD__)  // who writes where others read without a lock is what is tested

// Words of the segments that two or three ranks share change at any moment.
void shared_memory_is_damaged(std::uint64_t seed) {
    Random random(seed);
    const auto ranks = uniform<std::int32_t>(random, 2, 3);
    const auto window = one_of<std::uint32_t>(random, {2, 8});
    const SegmentLayout layout{ranks, 4096, window};
    Team team(ranks, layout.fragment_bytes, window);
    std::atomic<bool> over = false;
    std::jthread hostile([&, seed] {
        Random own(seed + 1);
        std::this_thread::sleep_for(std::chrono::microseconds(own() % 3000));
        for (auto left = uniform(own, 1, 60); left > 0 && !over; --left) {
            auto& segment = *team.segments[own() % team.segments.size()];
            // Mostly what is said of fragments, rarely what they hold.
            const std::size_t said = layout.slots_offset();
            const std::size_t start = own() % 4 == 0 ? layout.bytes() : 0;
            std::size_t at = own() % 8 == 0 ? own() % segment.bytes() : start + own() % said;
            if (own() % 2 == 0) {  // one of the words before the first fragments
                const std::size_t channel =
                    layout.channel_offset(uniform<std::int32_t>(own, 0, ranks - 1));
                at = start + channel + own() % (128 + 320 * 2) / 4 * 4;
            }
            const std::size_t bytes = own() % 2 == 0 ? 4 : 8;
            at = std::min(at, segment.bytes() - 8) / bytes * bytes;
            if (bytes == 4) {
                auto* word = reinterpret_cast<volatile std::uint32_t*>(segment.data() + at);
                *word = static_cast<std::uint32_t>(any_word(own, *word));
            } else {
                auto* word = reinterpret_cast<volatile std::uint64_t*>(segment.data() + at);
                *word = any_word(own, *word);
            }
            std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
        }
    });
    team.run([&](std::int32_t rank) { take_part(team.at(rank), seed); });
    over = true;
}

#endif

// A peer that knows the way to this rank says anything, and connections, requests and memory fail.
void a_peer_says_anything(std::uint64_t seed) {
    Random random(seed);
    Pair pair;
    std::vector<std::unique_ptr<syncline::Link>> links(2);
    links[1] = std::move(pair.link);
    const bool notices_only = random() % 4 == 0;
    std::vector<std::byte> data(2 * fragment_bytes);
    Call likely{.count = 300};
    std::mutex turn;  // a thread of the group drives, too
    std::atomic<bool> ending = false;
    const auto speak = [&] {
        const std::lock_guard lock(turn);
        Call call = likely;
        if (random() % 8 == 0) call.count = any_word(random, call.count);
        if (random() % 8 == 0) call.collective = static_cast<std::uint8_t>(random());
        if (random() % 16 == 0) call.dtype = static_cast<Dtype>(random());
        if (random() % 16 == 0) call.reduction = static_cast<Reduction>(random());
        if (random() % 4 == 0) call.sequence = static_cast<std::uint32_t>(random() % 20);
        const std::size_t header = random() % 16 == 0 ? random() % sizeof call : sizeof call;
        const std::size_t bytes = random() % 4 == 0
                                      ? random() % data.size()
                                      : std::min<std::size_t>(call.count * 4, fragment_bytes);
        (void)pair.arrive(&call, header, data.data(), bytes, random() % 3 == 0);
    };
    pair.ucx.on_progress = [&] {
        if (ending) return pair.ucx.end_all(UCS_OK);
        for (Request& each : pair.ucx.requests) {
            if (each.status == UCS_INPROGRESS && &each != pair.ucx.receiving_notice &&
                random() % 2 == 0) {
                each.status = random() % 200 == 0 ? UCS_ERR_CONNECTION_RESET : UCS_OK;
            }
        }
        if (random() % 50 == 0) memory_left = uniform(random, 0, 3);
        if (!notices_only && random() % 2 == 0) speak();
        if (pair.ucx.receiving_notice != nullptr &&
            pair.ucx.receiving_notice->status == UCS_INPROGRESS && random() % 8 == 0) {
            Notice said{.word = uniform<std::uint32_t>(random, 1, 4)};
            if (random() % 3 == 0) said.word = static_cast<std::uint32_t>(any_word(random, 1));
            if (random() % 3 == 0) said.taken = any_word(random, 10);
            if (random() % 3 == 0) said.taken_messages = any_word(random, 10);
            if (random() % 3 == 0) said.culprit = static_cast<std::int32_t>(any_word(random, 1));
            if (random() % 3 == 0) said.fault = static_cast<std::uint32_t>(random() % 4);
            pair.notice(said, random() % 20 == 0 ? UCS_ERR_MESSAGE_TRUNCATED : UCS_OK);
        }
        if (random() % 500 == 0) {
            pair.ucx.on_error.cb(pair.ucx.on_error.arg, nullptr, UCS_ERR_CONNECTION_RESET);
        }
        memory_left = -1;
    };
    Group group(0, std::move(links), std::make_unique<EventSleeper>(pair.worker, nullptr, -1),
                pair.worker, {});
    Random own(seed + 1);
    std::vector<std::vector<float>> memory;
    memory.reserve(20);
    Outcome end;
    for (int round = 0; round < 8 && end.rank == -2; ++round) {
        end = outcome([&] {
            std::vector<float>& work =
                memory.emplace_back(one_of<std::size_t>(own, {1, 300, 5000}));
            std::shared_ptr<syncline::Task> task;
            const bool messages = own() % 3 == 0;
            const auto tag = static_cast<std::uint32_t>(own() % 2);
            {
                const std::lock_guard lock(turn);
                likely = {.count = work.size(),
                          .sequence = messages ? tag : static_cast<std::uint32_t>(round + 1),
                          .collective = messages ? syncline::exchange : all_reduce};
            }
            if (messages) {
                const bool sends = own() % 3 == 0;
                const auto post = message(tag, 1, work, sends);
                sends ? group.send(post) : group.receive(post);
                task = post;
            } else {
                task = group.start(request<float>(direct(2), 0, 2, work, std::span<float>(work)),
                                   true);
            }
            group.wait(task, Clock::now() + milliseconds(20));
        });
    }
    ending = true;
    group.close();
    CHECK(pair.ucx.freed_in_progress == 0);
}

// A rank that has proved who it is says anything over TCP: frames, parts of them, and noise.
void a_peer_says_anything_over_tcp(std::uint64_t seed) {
    const auto [own, other] = connection();
    std::atomic<bool> over = false;
    std::jthread hostile([&, seed, socket = other] {
        Random random(seed);
        const timeval soon{0, 1000};
        setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof soon);
        std::vector<std::byte> data(sizeof(TcpHeader) + 2 * fragment_bytes);
        for (auto left = uniform(random, 1, 300); left > 0 && !over; --left) {
            TcpHeader header{.kind = uniform<std::uint32_t>(random, 1, 5)};
            header.call.count = one_of<std::uint64_t>(random, {1, 60, 300, 1500, 5000, random()});
            header.call.sequence = static_cast<std::uint32_t>(random() % 16);
            header.call.collective = header.kind == 2 ? syncline::exchange : random() % 5;
            const std::uint64_t bytes = header.call.count * 4;
            if (header.kind <= 2) header.bytes = static_cast<std::uint32_t>(bytes % 4100);
            for (int i = 0; i < 2; ++i) {
                if (random() % 8 != 0) continue;
                auto* words = reinterpret_cast<std::uint32_t*>(&header);
                std::uint32_t& word = words[random() % (sizeof header / 4)];
                word = static_cast<std::uint32_t>(any_word(random, word));
            }
            std::memcpy(data.data(), &header, sizeof header);
            std::size_t length = sizeof header + std::min<std::size_t>(header.bytes, 8000);
            if (random() % 20 == 0) length = random() % data.size();
            (void)!send(socket, data.data(), length, MSG_NOSIGNAL);
            if (random() % 4 == 0) {
                (void)!recv(socket, data.data(), data.size(), MSG_DONTWAIT);
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
            }
        }
        if (random() % 2 == 0) shutdown(socket, SHUT_WR);
        while (random() % 2 == 0 && !over) std::this_thread::sleep_for(milliseconds(1));
        close(socket);
    });
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    {
        const auto transport = std::make_shared<syncline::TcpTransport>();
        std::vector<std::unique_ptr<syncline::Link>> links(2);
        links[1] = std::make_unique<syncline::TcpLink>(transport, own, 1, fragment_bytes);
        Group group(0, std::move(links), std::make_unique<EventSleeper>(transport, nullptr, event),
                    transport, {std::chrono::nanoseconds(0), std::chrono::microseconds(20)});
        take_part(group, seed);
    }
    over = true;
    hostile.join();
    close(event);
}

#if !defined(__SANITIZE_THREAD__)  // which does not see into UCX

const UcxWorker::Settings settings = {{"TLS", "tcp,self"}, {"RNDV_THRESH", "inf"}};

bool connect_link(UcxWorker& worker, UcxLink& link, const std::atomic<bool>& over) {
    const auto deadline = Clock::now() + far_too_long;
    while (!link.connected() && link.broken().empty() && !over && Clock::now() < deadline) {
        if (!worker.progress()) worker.sleep(milliseconds(1));
    }
    return link.broken().empty() && !over;
}

// A way of one's own to a rank, beside a link; null: there is none.
ucp_ep_h way_to(const std::string& address, const UcxLibrary& ucx, UcxWorker& worker) {
    ucp_ep_params_t parameters{};
    parameters.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
    parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    ucp_ep_h endpoint = nullptr;
    if (ucx.ep_create(worker.handle(), &parameters, &endpoint) != UCS_OK) return nullptr;
    const ucp_request_param_t nothing{};
    void* flushing = ucx.ep_flush_nbx(endpoint, &nothing);
    if (!UCS_PTR_IS_PTR(flushing)) return endpoint;
    const auto deadline = Clock::now() + seconds(5);
    while (ucx.request_check_status(flushing) == UCS_INPROGRESS && Clock::now() < deadline) {
        worker.progress();
    }
    ucx.request_free(flushing);
    return endpoint;
}

// Say anything.
void speak_over_ucx(const UcxLibrary& ucx, UcxWorker& worker, ucp_ep_h endpoint, std::uint64_t seed,
                    const std::atomic<bool>& over) {
    Random random(seed);
    struct Sent {
        std::array<std::uint64_t, 6> words{};
        void* request = nullptr;
    };
    std::vector<std::byte> data(10'000);
    std::list<Sent> sent;
    const auto under_way = [&](const Sent& each) {
        return UCS_PTR_IS_PTR(each.request) &&
               ucx.request_check_status(each.request) == UCS_INPROGRESS;
    };
    const ucp_request_param_t nothing{};
    for (auto left = uniform(random, 1, 60); left > 0 && !over; --left) {
        auto& [words, request] = sent.emplace_back();
        const std::size_t bytes = random() % (random() % 4 == 0 ? data.size() : 64);
        if (random() % 2 == 0) {
            const Call call{.count = one_of<std::uint64_t>(random, {1, 60, 300, random()}),
                            .sequence = static_cast<std::uint32_t>(random() % 16),
                            .collective = static_cast<std::uint8_t>(random() % 12)};
            std::memcpy(words.data(), &call, sizeof call);
            const std::size_t header = random() % 4 == 0 ? random() % sizeof words : sizeof call;
            request =
                ucx.am_send_nbx(endpoint, 1, words.data(), header, data.data(), bytes, &nothing);
        } else {
            for (auto& word : words) word = any_word(random, 0);
            if (random() % 2 == 0) words[0] = 0xffff'ffff'0000'0000 | (1 + random() % 4);
            const ucp_tag_t tag = std::uint64_t{1} << 63 | (random() % 8 == 0 ? random() % 4 : 1);
            const std::size_t length = random() % 4 == 0 ? random() % sizeof words : 32;
            request = ucx.tag_send_nbx(endpoint, words.data(), length, tag, &nothing);
        }
        for (int look = 0; look < 100 && under_way(sent.back()); ++look) worker.progress();
    }
    ucp_request_param_t force{};
    force.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    force.flags = random() % 2 == 0 ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    sent.emplace_back().request = ucx.ep_close_nbx(endpoint, &force);
    const auto deadline = Clock::now() + seconds(2);
    while (std::ranges::any_of(sent, under_way) && Clock::now() < deadline) worker.progress();
    for (const Sent& each : sent) {
        if (UCS_PTR_IS_PTR(each.request)) ucx.request_free(each.request);
    }
}

void a_stranger_speaks_over_ucx(std::uint64_t seed) {
    const UcxLibrary& ucx = UcxLibrary::load(UCX_LIBRARY);
    const auto worker = std::make_shared<UcxWorker>(ucx, settings);
    const auto theirs = std::make_shared<UcxWorker>(ucx, settings);
    const std::string address = worker->address();
    std::atomic<bool> over = false;
    std::jthread hostile([&, seed] {
        (void)outcome([&] {
            ucp_ep_h endpoint = way_to(address, ucx, *theirs);
            UcxLink link(theirs, address, 1, 0, fragment_bytes, 8);
            if (connect_link(*theirs, link, over) && endpoint != nullptr) {
                speak_over_ucx(ucx, *theirs, endpoint, seed, over);
            }
        });
    });
    (void)outcome([&] {
        std::vector<std::unique_ptr<syncline::Link>> links(2);
        auto link = std::make_unique<UcxLink>(worker, theirs->address(), 0, 1, fragment_bytes, 8);
        if (!connect_link(*worker, *link, over)) return;
        links[1] = std::move(link);
        Group group(0, std::move(links), std::make_unique<EventSleeper>(worker, nullptr, -1),
                    worker, {std::chrono::nanoseconds(0), std::chrono::microseconds(20)});
        take_part(group, seed);
    });
    over = true;
}

#endif

void fuzz(seconds duration, std::optional<std::uint64_t> only_seed, const std::string& only) {
    struct Kind {
        const char* name;
        void (*run)(std::uint64_t);
        double share;
        std::uint64_t runs = 0;
    };
    Kind kinds[] = {
#if !defined(__SANITIZE_THREAD__)
        {"shared memory is damaged", &shared_memory_is_damaged, 0.3},
        {"a stranger speaks over UCX", &a_stranger_speaks_over_ucx, 0.2},
#endif
        {"a peer says anything to UCX", &a_peer_says_anything, 0.2},
        {"a peer says anything over TCP", &a_peer_says_anything_over_tcp, 0.3},
    };
    std::random_device device;
    Random seeds(device());
    for (Kind& kind : kinds) {
        if (std::string(kind.name).find(only) == std::string::npos) continue;
        const auto end =
            Clock::now() + std::chrono::duration_cast<Clock::duration>(duration * kind.share);
        do {
            const std::uint64_t seed = only_seed.value_or(seeds());
            in_time(seed, kind.name, [&] { kind.run(seed); });
            ++kind.runs;
        } while (Clock::now() < end && failed == 0);
        std::printf("%s: %llu times\n", kind.name, static_cast<unsigned long long>(kind.runs));
    }
}

}  // namespace

int main(int arguments, char** values) {
    fuzz(seconds(arguments > 1 ? std::atoi(values[1]) : 6),
         arguments > 3 ? std::optional(std::strtoull(values[3], nullptr, 10)) : std::nullopt,
         arguments > 2 ? values[2] : "");
    if (failed > 0) return 1;
    std::puts("fuzz tests passed");
    return 0;
}
