// Ranks as threads, and what they run.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "group.hpp"
#include "link.hpp"
#include "program.hpp"
#include "shared_link.hpp"
#include "tcp_link.hpp"

using std::chrono::milliseconds;
using std::chrono::seconds;
using syncline::Action;
using syncline::Call;
using syncline::Clock;
using syncline::Dtype;
using syncline::Group;
using syncline::Handle;
using syncline::Operation;
using syncline::PeerFailure;
using syncline::Program;
using syncline::Reduction;
using syncline::SegmentLayout;
using syncline::SharedLink;
using syncline::SharedMemory;
using syncline::Step;
using syncline::Timeout;

using Random = std::mt19937_64;

template <typename T>
T uniform(Random& random, T low, T high) {
    return std::uniform_int_distribution<T>(low, high)(random);
}

// Blocks that go from one rank to another in a step.
struct Flow {
    std::int32_t step, source, destination, block_start, block_stop;
    bool reduces;
};

// A collective as all ranks run it.
struct Shape {
    std::string name;
    std::uint8_t collective;
    std::int32_t blocks;
    std::vector<Flow> flows;
    std::int32_t root = -1;  // who alone gets the result; -1: all do

    [[nodiscard]] std::shared_ptr<const Program> of(std::int32_t rank, std::int32_t ranks) const {
        std::vector<Step> steps;
        for (const Flow& flow : flows) {
            if (flow.source == rank) {
                steps.push_back(
                    {flow.step, Action::send, flow.destination, flow.block_start, flow.block_stop});
            }
            if (flow.destination == rank) {
                steps.push_back({flow.step, flow.reduces ? Action::reduce : Action::copy,
                                 flow.source, flow.block_start, flow.block_stop});
            }
        }
        std::ranges::stable_sort(steps, {}, [](const Step& step) {
            return std::pair(step.step, step.action != Action::send);
        });
        return std::make_shared<Program>(rank, ranks, blocks, steps);
    }
};

inline constexpr std::uint8_t all_reduce = 0;
inline constexpr std::uint8_t broadcast = 1;
inline constexpr std::uint8_t reduce = 2;

inline Shape ring(std::int32_t ranks) {
    Shape shape{"ring", all_reduce, ranks, {}};
    for (std::int32_t step = 0; step < 2 * (ranks - 1); ++step) {
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
            const std::int32_t block = (rank + 2 * ranks - step) % ranks;
            shape.flows.push_back(
                {step, rank, (rank + 1) % ranks, block, block + 1, step < ranks - 1});
        }
    }
    return shape;
}

// Surplus ranks beyond a power of two hand in their vector first and get the result last.
inline Shape recursive_doubling(std::int32_t ranks) {
    Shape shape{"recursive doubling", all_reduce, 1, {}};
    std::int32_t core = 1;
    while (core * 2 <= ranks) core *= 2;
    std::int32_t step = 0;
    for (std::int32_t rank = core; rank < ranks; ++rank) {
        shape.flows.push_back({step, rank, rank - core, 0, 1, true});
    }
    for (std::int32_t bit = 1; bit < core; bit *= 2) {
        ++step;
        for (std::int32_t rank = 0; rank < core; ++rank) {
            shape.flows.push_back({step, rank, rank ^ bit, 0, 1, true});
        }
    }
    ++step;
    for (std::int32_t rank = core; rank < ranks; ++rank) {
        shape.flows.push_back({step, rank - core, rank, 0, 1, false});
    }
    return shape;
}

inline Shape direct(std::int32_t ranks) {
    Shape shape{"direct", all_reduce, ranks, {}};
    for (std::int32_t step = 0; step < 2 * (ranks - 1); ++step) {
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
            const std::int32_t peer = (rank + 1 + step % (ranks - 1)) % ranks;
            if (step < ranks - 1) {
                shape.flows.push_back({step, rank, peer, peer, peer + 1, true});
            } else {
                shape.flows.push_back({step, rank, peer, rank, rank + 1, false});
            }
        }
    }
    return shape;
}

// Down the chain 0, 1, ... block after block, added up on the way, and on with the sums.
inline Shape pipelined_all_reduce(std::int32_t ranks, std::int32_t blocks) {
    Shape shape{"linear pipeline", all_reduce, blocks, {}};
    for (std::int32_t block = 0; block < blocks; ++block) {
        for (std::int32_t hop = 0; hop + 1 < ranks; ++hop) {
            shape.flows.push_back({block + hop, hop, hop + 1, block, block + 1, true});
        }
        for (std::int32_t hop = 0; hop + 1 < ranks; ++hop) {  // from the last, to 0, 1, ...
            shape.flows.push_back({blocks + ranks + block + hop, (hop + ranks - 1) % ranks, hop,
                                   block, block + 1, false});
        }
    }
    return shape;
}

inline Shape pipelined_broadcast(std::int32_t ranks, std::int32_t blocks, std::int32_t root) {
    Shape shape{"pipelined broadcast", broadcast, blocks, {}};
    for (std::int32_t block = 0; block < blocks; ++block) {
        for (std::int32_t hop = 0; hop + 1 < ranks; ++hop) {
            shape.flows.push_back({block + hop, (root + hop) % ranks, (root + hop + 1) % ranks,
                                   block, block + 1, false});
        }
    }
    return shape;
}

// A chain towards the root, where each rank also takes from a leaf of its own: fan-in and order.
inline Shape chain_reduce(std::int32_t ranks, std::int32_t blocks, std::int32_t root) {
    Shape shape{"chain reduce", reduce, blocks, {}, root};
    const auto at = [&](std::int32_t place) { return (root + place) % ranks; };
    for (std::int32_t block = 0; block < blocks; ++block) {
        for (std::int32_t place = ranks - 1; place > 0; --place) {
            const std::int32_t to = place % 2 == 0 ? place - 2 : place - 1;  // odd ones are leaves
            const std::int32_t step = (ranks - place) * 2 + block * 2 * ranks;
            shape.flows.push_back({step, at(place), at(to), block, block + 1, true});
        }
    }
    return shape;
}

// A chain of even ranks, each of which also hands what it gets to an odd one.
inline Shape chain_with_fan_out(std::int32_t ranks, std::int32_t blocks) {
    Shape shape{"chain with fan-out", broadcast, blocks, {}};
    for (std::int32_t block = 0; block < blocks; ++block) {
        for (std::int32_t rank = 1; rank < ranks; ++rank) {
            const std::int32_t from = rank % 2 == 0 ? rank - 2 : rank - 1;
            shape.flows.push_back({block * 2 + rank, from, rank, block, block + 1, false});
        }
    }
    return shape;
}

inline std::vector<Shape> shapes(std::int32_t ranks) {
    const std::int32_t root = ranks - 1;
    return {ring(ranks),
            recursive_doubling(ranks),
            direct(ranks),
            pipelined_all_reduce(ranks, 1),
            pipelined_all_reduce(ranks, 7),
            pipelined_broadcast(ranks, 5, root),
            chain_reduce(ranks, 3, root),
            chain_with_fan_out(ranks, 4)};
}

// ---------------------------------------------------------------------- ranks as threads

inline std::shared_ptr<SharedMemory> memory(std::size_t bytes) {
    const int file = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0 ||
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
        std::abort();
    }
    auto mapped = std::make_shared<SharedMemory>(file, bytes);
    close(file);
    return mapped;
}

// Both ends of a TCP connection on the loopback device.
inline std::pair<int, int> connection() {
    const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof place;
    auto* address = reinterpret_cast<sockaddr*>(&place);
    const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listening, address, length) != 0 || listen(listening, 1) != 0 ||
        getsockname(listening, address, &length) != 0 || connect(caller, address, length) != 0) {
        std::abort();
    }
    const int answerer = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    close(listening);
    return {caller, answerer};
}

// What is before each fragment and notice over TCP, as in TcpLink.
struct TcpHeader {
    Call call{};
    std::uint32_t kind = 1;
    std::uint32_t bytes = 0;
    std::uint64_t taken = 0;
    std::uint64_t taken_messages = 0;
    std::int32_t culprit = -1;
    std::uint32_t fault = 0;
};

// Whether teams are joined by TCP instead of shared memory.
inline bool over_tcp = false;

class Team {
  public:
    explicit Team(std::int32_t ranks, std::size_t fragment_bytes = 4096, std::uint32_t window = 2,
                  std::chrono::nanoseconds spin = std::chrono::microseconds(20)) {
        if (over_tcp) {
            connect(ranks, fragment_bytes, spin);
            return;
        }
        const SegmentLayout layout{ranks, fragment_bytes, window};
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
            segments.push_back(memory(2 * layout.bytes()));
        }
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
            const auto own = static_cast<std::size_t>(rank);
            const auto slots = std::make_shared<syncline::Slots>(layout.slots());
            const auto message_slots = std::make_shared<syncline::Slots>(layout.slots());
            std::vector<std::unique_ptr<syncline::Link>> links(static_cast<std::size_t>(ranks));
            for (std::int32_t peer = 0; peer < ranks; ++peer) {
                if (peer == rank) continue;
                const auto join = [&](const auto& own_slots, std::size_t start) {
                    return std::make_unique<SharedLink>(layout, segments[own],
                                                        segments[static_cast<std::size_t>(peer)],
                                                        rank, peer, own_slots, peer, -1, start);
                };
                auto link = join(slots, 0);
                link->carry_messages(join(message_slots, layout.bytes()));
                links[static_cast<std::size_t>(peer)] = std::move(link);
            }
            groups.push_back(std::make_unique<Group>(
                rank, std::move(links),
                std::make_unique<syncline::BellSleeper>(SharedLink::bell_of(*segments[own])),
                nullptr, Group::Patience{rank % 2 == 0 ? spin / 2 : spin, spin}));
        }
    }

    [[nodiscard]] std::int32_t ranks() const { return static_cast<std::int32_t>(groups.size()); }
    [[nodiscard]] Group& at(std::int32_t rank) { return *groups[static_cast<std::size_t>(rank)]; }

    // Run something on a thread for each of the ranks.
    void run(const std::function<void(std::int32_t)>& job) {
        std::vector<std::jthread> threads;
        for (std::int32_t rank = 0; rank < ranks(); ++rank) {
            threads.emplace_back([&job, rank] { job(rank); });
        }
    }

    ~Team() {
        groups.clear();
        for (const int event : events) ::close(event);
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::vector<std::shared_ptr<SharedMemory>> segments;
    std::vector<std::unique_ptr<Group>> groups;
    std::vector<int> events;

  private:
    void connect(std::int32_t ranks, std::size_t fragment_bytes, std::chrono::nanoseconds spin) {
        const auto count = static_cast<std::size_t>(ranks);
        std::vector<std::shared_ptr<syncline::TcpTransport>> transports;
        std::vector<std::vector<std::unique_ptr<syncline::Link>>> links(count);
        for (std::size_t rank = 0; rank < count; ++rank) {
            transports.push_back(std::make_shared<syncline::TcpTransport>());
            links[rank].resize(count);
        }
        const auto join = [&](std::size_t rank, std::size_t peer, int socket) {
            links[rank][peer] = std::make_unique<syncline::TcpLink>(
                transports[rank], socket, static_cast<std::int32_t>(peer), fragment_bytes);
        };
        for (std::size_t rank = 0; rank < count; ++rank) {
            for (std::size_t peer = 0; peer < rank; ++peer) {
                const auto [own, other] = connection();
                join(rank, peer, own);
                join(peer, rank, other);
            }
        }
        for (std::size_t rank = 0; rank < count; ++rank) {
            events.push_back(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
            groups.push_back(std::make_unique<Group>(
                static_cast<std::int32_t>(rank), std::move(links[rank]),
                std::make_unique<syncline::EventSleeper>(transports[rank], nullptr, events[rank]),
                transports[rank], Group::Patience{std::chrono::nanoseconds(0), spin}));
        }
    }
};

inline Clock::time_point soon() { return Clock::now() + seconds(60); }

template <typename T>
constexpr Dtype dtype_of = std::is_same_v<T, float> ? Dtype::float32 : Dtype::int64;

template <typename T>
Operation::Request request(const Shape& shape, std::int32_t rank, std::int32_t ranks,
                           std::span<const T> input, std::span<T> work, std::uint32_t variant = 0) {
    const Call call{input.size(), 0, variant, shape.collective, dtype_of<T>, Reduction::sum, 0};
    return {shape.of(rank, ranks),
            call,
            reinterpret_cast<const std::byte*>(input.data()),
            reinterpret_cast<std::byte*>(work.data()),
            0,
            input.size(),
            nullptr};
}

// What a wait, or a start, ends with.
struct Outcome {
    std::int32_t rank = -2;
    bool disagrees = false;
    std::string what;
};

template <typename Run>
Outcome outcome(Run run) {
    try {
        run();
    } catch (const PeerFailure& failure) {
        return {failure.rank, failure.fault == syncline::Fault::disagrees, failure.what()};
    } catch (const Timeout& timeout) {
        return {-3, false, timeout.what()};
    }
    return {};
}

inline bool says(const Outcome& outcome, const std::string& words) {
    if (outcome.what.find(words) != std::string::npos) return true;
    std::fprintf(stderr, "%s is not in: %s\n", words.c_str(), outcome.what.c_str());
    return false;
}

inline syncline::MessageHandle message(std::uint32_t tag, std::int32_t peer,
                                       std::vector<float>& memory, bool sends,
                                       std::uint8_t kind = syncline::exchange) {
    const Call call{memory.size(), tag, 0, kind, Dtype::float32, Reduction::sum, 0};
    auto* bytes = reinterpret_cast<std::byte*>(memory.data());
    return std::make_shared<syncline::Message>(call, peer, sends ? bytes : nullptr,
                                               sends ? nullptr : bytes);
}
