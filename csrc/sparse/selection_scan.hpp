// The inner loop of selection: one pass over a block that updates, compares and compacts. One
// version for each set of vector instructions; all give the same bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace syncline {

enum class Instructions : std::uint8_t { portable, avx2, avx512 };

// The widest that this processor has.
[[nodiscard]] Instructions widest_instructions();
[[nodiscard]] bool has_instructions(Instructions instructions);

// The magnitude of a value as an integer: in the order of magnitudes, then infinity, then NaN.
[[nodiscard]] inline std::uint32_t magnitude_of(float value) {
    return std::bit_cast<std::uint32_t>(value) & 0x7fffffffU;
}

inline constexpr std::uint32_t infinite_magnitude = 0x7f800000U;

// The values to select from, and their update on the way. If there is a gradient, each value
// becomes
//     velocity = momentum * velocity + gradient   (where there is a velocity)
//     values  += velocity, or gradient
// Arrays of the same length that do not overlap.
struct Streams {
    float* values = nullptr;
    const float* gradient = nullptr;
    float* velocity = nullptr;
    float momentum = 0.0F;
    std::size_t first = 0;  // the index of the first element, where arrays are parts of a vector
};

// A scan may write this many elements more than it appends to either array.
inline constexpr std::size_t scan_padding = 16;

// Values whose magnitude exceeded the threshold, in the order of their indices.
struct Candidates {
    float* values;
    std::uint32_t* indices;
    std::size_t count;
};

// Update the elements [start, stop) of the arrays and append those whose magnitude is above the
// threshold, with their indices in the vector. The arrays of the candidates have room for stop -
// start + scan_padding more.
using Scan = void (*)(const Streams& streams, std::size_t start, std::size_t stop,
                      std::uint32_t threshold, Candidates& candidates);

[[nodiscard]] Scan scan_with(Instructions instructions, const Streams& streams);

// The first element of [0, count) that is infinite or NaN, or count.
[[nodiscard]] std::size_t first_not_finite(const float* values, std::size_t count,
                                           Instructions instructions);

}  // namespace syncline
