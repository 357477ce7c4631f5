// How a rank sleeps until its peers do something, in memory that they share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace syncline {

// Lies in shared memory. One thread at a time sleeps on it; any process may ring.
struct Doorbell {
    alignas(64) std::atomic<std::uint32_t> sleeping;
    std::atomic<std::uint32_t> rung;

    // How a sleeper is woken: in sleep(), or wherever it waits for an eventfd.
    static constexpr std::uint32_t by_futex = 1;
    static constexpr std::uint32_t by_event = 2;

    // No sleep takes longer: any process may write here, or consume the sleeper's wake-up.
    static constexpr std::chrono::seconds longest_sleep{1};

    // Wake the sleeper, if there is one; to be called after writing what it should see. `event` is
    // the sleeper's eventfd, or -1.
    void ring(int event = -1);
    // Wake the sleeper by futex, even if it is not known to sleep.
    void wake();
    // Announce that this thread is about to sleep: whoever writes from now on rings.
    std::uint32_t announce(std::uint32_t how = by_futex);
    void withdraw() { sleeping.store(0, std::memory_order_relaxed); }
    // Sleep until rung since announce(), until the deadline, or for longest_sleep; withdraws.
    void sleep(std::uint32_t announced, std::chrono::steady_clock::time_point deadline);
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace syncline
