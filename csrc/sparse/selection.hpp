// The k elements of largest magnitude, exactly, in one pass over the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "selection_scan.hpp"
#include "sparse_vector.hpp"

namespace syncline {

// The k-th largest magnitude, and how many are larger.
struct Cut {
    std::uint32_t magnitude;
    std::size_t above;
};

// 1 <= k <= values.size(). A radix selection: a histogram of the exponent and the high bits of the
// mantissa, then the remaining bits of those in the one bin that matters. O(n).
[[nodiscard]] Cut cut_of(std::span<const float> values, std::size_t k);

// How many entries are wanted. With least = most = k, exactly the k largest are taken. Otherwise
// all that exceed the hint are taken if these are least to most entries; if not, the k largest
// are.
struct Wanted {
    std::size_t k;
    std::size_t least;
    std::size_t most;
    std::uint32_t hint = 0;  // a magnitude to start from, such as the last selection's; 0: none
};

struct Selection {
    SparseVector taken;
    // Everything above it was taken, and nothing below.
    std::uint32_t threshold = 0;
    bool finite = true;  // of the values after their update; else nothing was taken
    bool exact = true;   // the k largest were taken
};

// One of the parts that make up a vector, one after the other.
struct Part {
    float* values = nullptr;
    const float* gradient = nullptr;
    float* velocity = nullptr;
    std::size_t count = 0;
};

// Update the values (see Streams), take those of largest magnitude and set them to zero, and their
// velocities as well, if `clear`. Of equal magnitudes the lower index is taken. Zeros are never
// taken, so there may be fewer than k.
//
// A threshold is guessed from a sample, a little low; the pass collects what is above it, and the
// k largest of these are the result. Should the guess be too high, a second pass starts from zero.
// Should what is collected outgrow its buffer of about 2 k, it is cut down to its k largest, which
// raises the threshold. So the result is exact, whatever the guess, and the time O(n) for any data.
//
// At most 2^32 - 1 elements. Throws std::invalid_argument if least <= k <= most does not hold.
[[nodiscard]] Selection select(std::span<const Part> parts, float momentum, const Wanted& wanted,
                               bool clear, Instructions instructions);

}  // namespace syncline
