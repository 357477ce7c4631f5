// Writing memory that another core has read, or will.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace syncline {

// memcpy() with stores that go past the caches. What is written is seen by other threads once
// something stored after it is.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes);

// Note [stores past the caches]
//
// A store to a line that another core has read must first take the line back. Where two cores do
// not share a cache that costs as much as 28 ns a line and hardly overlaps, 2.3 GB/s, as measured
// on a virtual machine with two cores of an EPYC; where they do, a fourth of that. Stores past the
// caches write 15 to 30 GB/s either way, but whoever reads such a line fetches it from memory. So
// which are better depends on which cores the threads run on, which a hypervisor may change at any
// moment: both are timed, and now and then the ones that are not used are tried.

// Chooses between the two ways to write, for one purpose. Used by one thread at a time.
class Stores {
  public:
    // `worth`: write past the caches if the other way takes more than this many times as long.
    // More than 1, because a reader takes longer, too.
    explicit Stores(double worth) : worth_(worth) {}

    // Smaller pieces are in the cache of whoever wrote them, or too small to time.
    static constexpr std::size_t least_bytes = 8 * 1024;

    // Call `write(past)` for a piece of so many bytes, which writes past the caches or not.
    template <typename Write>
    void write(std::size_t bytes, Write&& write_piece) {
        if (bytes < least_bytes) return std::forward<Write>(write_piece)(false);
        const bool past = next();
        const auto began = std::chrono::steady_clock::now();
        std::forward<Write>(write_piece)(past);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        learn(past, took.count() / static_cast<double>(bytes));
    }

    // How to write the next piece.
    [[nodiscard]] bool next();
    // How long a piece that was written this way took, in seconds a byte.
    void learn(bool past, double s_per_byte);

  private:
    double worth_;
    double s_per_byte_[2] = {0, 0};  // cached, past the caches
    bool past_ = false;
    bool tries_ = false;
    std::uint32_t left_ = 4;  // pieces until the other way is tried
    std::uint32_t interval_ = 16;
};

}  // namespace syncline
