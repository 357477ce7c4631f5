#include "doorbell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <limits>

namespace syncline {

namespace {

// Without FUTEX_PRIVATE_FLAG: other processes wake.
void futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value,
           const timespec* timeout) {
    // An error is a spurious wake-up: the caller polls again anyway.
    (void)syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void Doorbell::ring(int event) {
    // Either the sleeper sees what was written before, or this sees that it sleeps.
#if defined(__SANITIZE_THREAD__)  // it does not know fences
    const std::uint32_t how = sleeping.fetch_or(0, std::memory_order_seq_cst);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::uint32_t how = sleeping.load(std::memory_order_relaxed);
#endif
    if (how == 0) return;
    if (how != by_event) wake();
    if (how != by_futex && event >= 0) {
        const std::uint64_t one = 1;
        (void)!write(event, &one, sizeof one);  // it fails only where a wake-up is due already
    }
}

void Doorbell::wake() {
    rung.fetch_add(1, std::memory_order_release);
    futex(&rung, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr);
}

std::uint32_t Doorbell::announce(std::uint32_t how) {
    const std::uint32_t before = rung.load(std::memory_order_acquire);
#if defined(__SANITIZE_THREAD__)
    sleeping.exchange(how, std::memory_order_seq_cst);
#else
    sleeping.store(how, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
    return before;
}

void Doorbell::sleep(std::uint32_t announced, std::chrono::steady_clock::time_point deadline) {
    const auto left = deadline - std::chrono::steady_clock::now();
    const auto ns = std::clamp(std::chrono::duration_cast<std::chrono::nanoseconds>(left),
                               std::chrono::nanoseconds(0), std::chrono::nanoseconds(longest_sleep))
                        .count();
    const timespec timeout{static_cast<std::time_t>(ns / 1'000'000'000),
                           static_cast<long>(ns % 1'000'000'000)};
    futex(&rung, FUTEX_WAIT, announced, &timeout);
    withdraw();
}

}  // namespace syncline
