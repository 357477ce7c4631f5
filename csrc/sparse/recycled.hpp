// Memory for vectors that come and go with every message of an exchange.
//
// Large freed blocks would go back to the kernel, and the next vector would pay a page fault for
// every 4 KiB, which costs a merged vector as much as merging. So such blocks are kept for reuse,
// up to a bound. They are not zeroed, because every element is written before it is read.
#pragma once

#include <pthread.h>

#include <array>
#include <bit>
#include <cstddef>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace syncline {

// Free blocks of powers of two. Any thread may take and give.
class BlockCache {
  public:
    static constexpr std::size_t least_bytes = std::size_t{1} << 16;
    static constexpr std::size_t most_kept_bytes = std::size_t{1} << 26;

    // Of the process. It is never destroyed: arrays of the interpreter may outlive everything.
    static BlockCache& shared() {
        static auto* cache = [] {
            // A forked process must not wait for a lock whose owner it does not have.
            pthread_atfork([] { shared().mutex_.lock(); }, [] { shared().mutex_.unlock(); },
                           [] { shared().mutex_.unlock(); });
            return new BlockCache;
        }();
        return *cache;
    }

    void* take(std::size_t bytes) {
        const std::size_t size = std::bit_ceil(bytes);
        {
            const std::lock_guard lock(mutex_);
            auto& free = free_[static_cast<std::size_t>(std::countr_zero(size))];
            if (!free.empty()) {
                void* block = free.back();
                free.pop_back();
                kept_bytes_ -= size;
                return block;
            }
        }
        return ::operator new(size);
    }

    void give(void* block, std::size_t bytes) noexcept {
        const std::size_t size = std::bit_ceil(bytes);
        try {
            const std::lock_guard lock(mutex_);
            if (kept_bytes_ + size <= most_kept_bytes) {
                free_[static_cast<std::size_t>(std::countr_zero(size))].push_back(block);
                kept_bytes_ += size;
                return;
            }
        } catch (const std::bad_alloc&) {
            // No room to note it down: then it is freed.
        }
        ::operator delete(block);
    }

    [[nodiscard]] std::size_t kept_bytes() {
        const std::lock_guard lock(mutex_);
        return kept_bytes_;
    }

    // Free what is kept.
    void clear() {
        const std::lock_guard lock(mutex_);
        for (auto& blocks : free_) {
            for (void* block : blocks) ::operator delete(block);
            blocks.clear();
        }
        kept_bytes_ = 0;
    }

  private:
    std::mutex mutex_;
    std::array<std::vector<void*>, 64> free_;  // by the logarithm of their size
    std::size_t kept_bytes_ = 0;
};

template <typename T>
struct Recycled {
    using value_type = T;

    Recycled() = default;
    template <typename U>
    explicit Recycled(const Recycled<U>& /*other*/) noexcept {}

    T* allocate(std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        return static_cast<T*>(is_small(bytes) ? ::operator new(bytes)
                                               : BlockCache::shared().take(bytes));
    }

    void deallocate(T* block, std::size_t count) noexcept {
        const std::size_t bytes = count * sizeof(T);
        if (is_small(bytes)) {
            ::operator delete(block);
        } else {
            BlockCache::shared().give(block, bytes);
        }
    }

    // resize() leaves new elements as they are.
    template <typename U>
    void construct(U* at) noexcept {
        ::new (static_cast<void*>(at)) U;
    }
    template <typename U, typename... Arguments>
    void construct(U* at, Arguments&&... arguments) {
        ::new (static_cast<void*>(at)) U(std::forward<Arguments>(arguments)...);
    }

    friend bool operator==(const Recycled& /*a*/, const Recycled& /*b*/) { return true; }

  private:
    static bool is_small(std::size_t bytes) { return bytes < BlockCache::least_bytes; }
};

// Of elements that are written before they are read.
template <typename T>
using RecycledVector = std::vector<T, Recycled<T>>;

}  // namespace syncline
