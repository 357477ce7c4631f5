// Tests of links over TCP that a peer speaks to frame by frame.
#include <linux/filter.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "team.hpp"

namespace {

using syncline::Link;
using syncline::TcpLink;
using syncline::TcpTransport;

constexpr std::size_t fragment_bytes = 4096;
constexpr std::size_t most_ahead = (std::size_t{1} << 21) / fragment_bytes;

using Header = TcpHeader;
constexpr std::uint32_t of_collective = 1, of_message = 2, taken = 3, given_up = 4, left = 5;

// A link whose peer, rank 1, is the test.
struct Peer {
    explicit Peer(milliseconds silence = seconds(25))
        : transport(std::make_shared<TcpTransport>(silence)) {
        const auto [own, other] = connection();
        link = std::make_unique<TcpLink>(transport, own, 1, fragment_bytes);
        socket = other;
    }
    ~Peer() {
        if (socket >= 0) close(socket);
    }
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    void write(const void* data, std::size_t bytes) const {
        CHECK(::send(socket, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes));
    }
    void write(const Header& header, std::size_t bytes = 0) const {
        std::vector<std::byte> frame(sizeof header + bytes, std::byte{1});
        std::memcpy(frame.data(), &header, sizeof header);
        write(frame.data(), frame.size());
    }
    void hang_up() { close(std::exchange(socket, -1)); }
    // What the link says of what has arrived; empty if nothing is wrong.
    [[nodiscard]] std::string refusal() const {
        return outcome([&] {
                   const auto until = Clock::now() + milliseconds(20);
                   while (Clock::now() < until) transport->progress();
               })
            .what;
    }
    template <typename Condition>
    void until(Condition&& holds) const {
        const auto deadline = Clock::now() + seconds(30);
        while (!holds() && Clock::now() < deadline) transport->progress();
        CHECK(holds());
    }

    std::shared_ptr<TcpTransport> transport;
    std::unique_ptr<TcpLink> link;
    int socket = -1;
};

void what_no_rank_says_is_refused() {
    const auto refused = [](const Header& header, std::size_t bytes = 0) {
        Peer peer;
        const std::array<std::byte, 8> data{};
        for (int i = 0; i < 3; ++i) {
            peer.link->send(data.data(), data.size(), {.count = 2}, true, std::nullopt);
        }
        peer.write(header, bytes);
        return peer.refusal().starts_with("rank 1 is faulty: expected ");
    };
    CHECK(!refused({.kind = taken, .taken = 3}));
    CHECK(!refused({.kind = given_up, .culprit = 7}));  // the group knows how many there are
    CHECK(!refused({.kind = left}));
    CHECK(refused({.kind = taken, .taken = 4}));
    CHECK(refused({.kind = taken, .taken = ~std::uint64_t{0}}));
    CHECK(refused({.kind = taken, .taken_messages = 1}));
    CHECK(refused({.kind = taken, .bytes = 8}, 8));
    CHECK(refused({.kind = 0}));
    CHECK(refused({.kind = 6}));
    CHECK(refused({.kind = given_up, .fault = 3}));

    const auto none = static_cast<Dtype>(99);
    CHECK(!refused({.call = {.count = 10}, .bytes = 40}, 40));
    CHECK(refused({.call = {.count = 10}, .bytes = fragment_bytes + 1}));
    CHECK(refused({.call = {.count = 10}, .bytes = ~std::uint32_t{0}}));
    CHECK(refused({.call = {.count = 10, .dtype = none}, .bytes = 40}));
    CHECK(refused({.call = {.count = 10, .collective = 9}, .bytes = 40}));
    CHECK(refused({.call = {.count = std::uint64_t{1} << 62}, .bytes = 40}));
}

// A rank waits for acknowledgements: one that does not would fill this rank's memory.
void a_peer_that_does_not_wait_is_refused() {
    for (const std::uint32_t kind : {of_collective, of_message}) {
        Peer peer;
        Header header{.call = {.count = 1}, .kind = kind, .bytes = 4};
        if (kind == of_message) header.call.collective = syncline::exchange;
        for (std::size_t i = 0; i < most_ahead; ++i) peer.write(header, 4);
        CHECK(peer.refusal().empty());
        peer.write(header, 4);
        CHECK(peer.refusal().starts_with("rank 1 is faulty: expected at most 512 fragments ahead"));
    }
}

// Whatever the parts in which it comes, and whether it was asked for before or after.
void a_fragment_comes_in_any_parts() {
    Random random(1);
    for (int round = 0; round < 300; ++round) {
        Peer peer;
        const auto count = uniform<std::size_t>(random, 0, 1000);
        const Call call{.count = 5000};
        const bool reduces = random() % 2 == 0;
        const std::vector<float> own(count, 2.0F);
        std::vector<std::vector<float>> results(3, std::vector<float>(count, -1.0F));
        std::vector<std::byte> stream;
        for (std::size_t i = 0; i < results.size(); ++i) {
            const Header header{.call = call, .bytes = static_cast<std::uint32_t>(4 * count)};
            const std::vector<float> values(count, static_cast<float>(i));
            const auto* start = reinterpret_cast<const std::byte*>(&header);
            stream.insert(stream.end(), start, start + sizeof header);
            start = reinterpret_cast<const std::byte*>(values.data());
            stream.insert(stream.end(), start, start + 4 * count);
        }
        const std::size_t early = random() % 4;
        const auto receive = [&](std::size_t i) {
            peer.link->receive(
                {reinterpret_cast<std::byte*>(results[i].data()),
                 reduces ? reinterpret_cast<const std::byte*>(own.data()) : nullptr, 4 * count},
                call);
        };
        for (std::size_t i = 0; i < early; ++i) receive(i);
        for (std::size_t at = 0; at < stream.size();) {
            const std::size_t bytes =
                std::min(stream.size() - at, uniform<std::size_t>(random, 1, 3000));
            peer.write(stream.data() + at, bytes);
            at += bytes;
            peer.transport->progress();
        }
        for (std::size_t i = early; i < results.size(); ++i) receive(i);
        peer.until([&] { return peer.link->received() == results.size(); });
        for (std::size_t i = 0; i < results.size(); ++i) {
            const float expected = static_cast<float>(i) + (reduces ? 2.0F : 0.0F);
            CHECK(std::ranges::all_of(results[i], [&](float each) { return each == expected; }));
        }
    }
}

// A notice comes through although nobody takes what is before it.
void notices_come_behind_what_nobody_takes() {
    Peer peer;
    for (std::size_t i = 0; i < most_ahead; ++i) {
        peer.write({.call = {.count = 1}, .bytes = 4}, 4);
        peer.write({.call = {.count = 1, .collective = syncline::exchange},
                    .kind = of_message,
                    .bytes = 4},
                   4);
    }
    peer.write({.kind = given_up, .culprit = 2});
    peer.until([&] { return peer.link->given_up().has_value(); });
    CHECK(peer.link->given_up()->culprit == 2);
    peer.link->give_up({2, syncline::Fault::lost});
    peer.link->end();
    peer.until([&] { return peer.link->ended(); });
}

// What had come before the connection broke is received, what had begun is not.
void what_came_before_the_end_is_received() {
    Peer peer;
    const Call call{.count = 1};
    peer.write({.call = call, .bytes = 4}, 4);
    const Header half{.call = call, .bytes = 4};
    peer.write(&half, sizeof half);
    peer.hang_up();
    peer.until([&] { return !peer.link->broken().empty(); });
    CHECK(peer.link->cut_off() && !peer.link->can_send() && peer.link->has_arrived());
    std::uint32_t value = 0;
    peer.link->receive({reinterpret_cast<std::byte*>(&value), nullptr, 4}, call);
    CHECK(peer.link->received() == 1 && value == 0x01010101 && !peer.link->has_arrived());
}

void a_peer_that_leaves_is_not_cut_off() {
    Peer peer;
    peer.write({.kind = left});
    peer.hang_up();
    peer.until([&] { return !peer.link->broken().empty(); });
    CHECK(!peer.link->cut_off() && peer.link->broken() == "rank 1 has left the group");
}

// It acknowledges what fits its buffers, and takes no more.
void a_late_peer_is_not_cut_off() {
    constexpr milliseconds silence{100};
    Peer peer(silence);
    const std::vector<std::byte> data(fragment_bytes);
    const int small = 1 << 14;
    CHECK(setsockopt(peer.socket, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0);
    std::size_t sent = 0;
    const auto late = Clock::now() + 10 * silence;
    while (Clock::now() < late) {
        for (; peer.link->can_send(); ++sent) {
            peer.link->send(data.data(), data.size(), {.count = 1 << 20}, true, std::nullopt);
        }
        peer.transport->progress();
        (void)peer.transport->arm();
    }
    CHECK(!peer.link->can_send() && peer.link->broken().empty());
    std::vector<std::byte> got(sent * (sizeof(Header) + fragment_bytes));
    std::thread reader([&] {
        CHECK(recv(peer.socket, got.data(), got.size(), MSG_WAITALL) ==
              static_cast<ssize_t>(got.size()));
    });
    peer.until([&] { return peer.link->released() == sent; });
    reader.join();
}

void a_silent_host_is_cut_off() {
    Peer peer(milliseconds(100));
    sock_filter nothing[] = {{BPF_RET | BPF_K, 0, 0, 0}};
    const sock_fprog drops{.len = 1, .filter = nothing};
    CHECK(setsockopt(peer.socket, SOL_SOCKET, SO_ATTACH_FILTER, &drops, sizeof drops) == 0);
    const std::uint32_t value = 0;
    peer.link->send(reinterpret_cast<const std::byte*>(&value), 4, {.count = 1}, false,
                    std::nullopt);
    peer.until([&] {
        (void)peer.transport->arm();
        return !peer.link->broken().empty();
    });
    CHECK(peer.link->cut_off() && peer.link->broken().find("timed out") != std::string::npos);
}

// What was sent last arrives although this rank leaves at once, with something unread.
void what_was_sent_last_arrives() {
    Peer peer;
    const std::vector<std::byte> data(fragment_bytes);
    std::size_t sent = 0;
    for (; peer.link->can_send() && sent < 8; ++sent) {
        peer.link->send(data.data(), data.size(), {.count = 10'000}, true, std::nullopt);
    }
    peer.write({.call = {.count = 1}, .bytes = 4}, 4);
    peer.link->end();
    peer.until([&] { return peer.link->ended(); });
    peer.link.reset();
    std::vector<std::byte> got(sent * (sizeof(Header) + fragment_bytes) + sizeof(Header));
    CHECK(recv(peer.socket, got.data(), got.size(), MSG_WAITALL) ==
          static_cast<ssize_t>(got.size()));
    Header last;
    std::memcpy(&last, got.data() + got.size() - sizeof last, sizeof last);
    CHECK(last.kind == left);
}

// Else its peers would not see that this process has ended.
void a_fork_keeps_no_connection() {
    Peer peer;
    const pid_t child = fork();
    if (child == 0) {
        for (;;) pause();
    }
    peer.link.reset();
    std::byte any{};
    CHECK(recv(peer.socket, &any, 1, 0) == 0);
    kill(child, SIGKILL);
    CHECK(waitpid(child, nullptr, 0) == child);
}

}  // namespace

int main() {
    what_no_rank_says_is_refused();
    a_peer_that_does_not_wait_is_refused();
    a_fragment_comes_in_any_parts();
    notices_come_behind_what_nobody_takes();
    what_came_before_the_end_is_received();
    a_peer_that_leaves_is_not_cut_off();
    a_late_peer_is_not_cut_off();
    a_silent_host_is_cut_off();
    what_was_sent_last_arrives();
    a_fork_keeps_no_connection();
    if (failed > 0) return 1;
    std::puts("tcp tests passed");
    return 0;
}
