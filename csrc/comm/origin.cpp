#include "origin.hpp"

#include <pthread.h>

#include <atomic>

namespace syncline {

namespace {

// How many forks lie between this process and the one that loaded the core.
std::atomic<std::uint32_t> forks = 0;
[[maybe_unused]] const int counting =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Origin::Origin() : forks_(forks.load(std::memory_order_relaxed)) {}

bool Origin::forked() const { return forks.load(std::memory_order_relaxed) != forks_; }

}  // namespace syncline
