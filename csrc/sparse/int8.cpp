#include "int8.hpp"

#include <algorithm>
#include <bit>

#include "clones.hpp"

namespace syncline {

namespace {

constexpr std::int32_t magnitude = 0x7fffffff;
constexpr std::uint32_t not_finite = 255;
constexpr std::uint32_t bias = 127;
// The largest element of a block becomes 64 to 127.
constexpr std::uint32_t places = 6;
// Adding it rounds a small float to an integer, ties to even, which is then in the low bits.
constexpr float rounder = 0x1.8p23F;

float power(std::uint32_t exponent) { return std::bit_cast<float>(exponent << 23); }

struct Sum {
    std::uint32_t exponent;
    bool is_sent;  // whether there is anything to round
};

// Adds the residuals of one block to its elements that are not zero, and clears these residuals.
SYNCLINE_INLINED Sum add_residual(float* __restrict values, float* __restrict residual,
                                  std::size_t count, float factor) {
    std::int32_t any = 0;
    for (std::size_t i = 0; i < count; ++i) any |= std::bit_cast<std::int32_t>(values[i]);
    if ((any & magnitude) == 0) return {1, false};
    // Signed, since baseline instructions have no greatest of unsigned integers.
    std::int32_t greatest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const bool is_zero = values[i] == 0.0F;
        const float sum = is_zero ? values[i] : factor * values[i] + residual[i];
        residual[i] = is_zero ? residual[i] : 0.0F;
        values[i] = sum;
        greatest = std::max(greatest, std::bit_cast<std::int32_t>(sum) & magnitude);
    }
    const std::uint32_t found = static_cast<std::uint32_t>(greatest) >> 23;
    if (found == not_finite) {
        std::fill_n(residual, count, 0.0F);
        return {not_finite, false};
    }
    return {std::max(found, places + 1) - places, true};
}

// Rounds one block to integers times a power of two; the values become these, and what is lost is
// added to the residuals.
SYNCLINE_INLINED void round_to_units(float* __restrict values, float* __restrict residual,
                                     std::int8_t* __restrict integers, std::size_t count,
                                     std::uint32_t exponent) {
    const float unit = power(exponent);
    const float inverse = power(2 * bias - exponent);
    for (std::size_t i = 0; i < count; ++i) {
        const float shifted = values[i] * inverse + rounder;
        const std::int32_t rounded =
            std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(rounder);
        const std::int32_t integer = std::clamp(rounded, -127, 127);
        const float found = static_cast<float>(integer) * unit;
        integers[i] = static_cast<std::int8_t>(integer);
        residual[i] += values[i] - found;
        values[i] = found;
    }
}

}  // namespace

SYNCLINE_CLONES void int8_take(float* values, float* residual, std::size_t count, float factor) {
    for (std::size_t start = 0; start < count; start += int8_block) {
        const std::size_t size = std::min(int8_block, count - start);
        add_residual(values + start, residual + start, size, factor);
    }
}

SYNCLINE_CLONES void int8_encode(float* values, float* residual, std::size_t count, float factor,
                                 std::uint8_t* encoded) {
    auto* integers = reinterpret_cast<std::int8_t*>(encoded);
    std::uint8_t* exponents = encoded + count;
    for (std::size_t start = 0; start < count; start += int8_block) {
        const std::size_t size = std::min(int8_block, count - start);
        float* const value = values + start;
        float* const kept = residual + start;
        std::int8_t* const integer = integers + start;
        const Sum sum = add_residual(value, kept, size, factor);
        exponents[start / int8_block] = static_cast<std::uint8_t>(sum.exponent);
        if (!sum.is_sent) {
            std::fill_n(integer, size, std::int8_t{0});
            std::fill_n(value, size, 0.0F * power(sum.exponent));  // NaN if it is not finite
            continue;
        }
        round_to_units(value, kept, integer, size, sum.exponent);
    }
}

SYNCLINE_CLONES void int8_decode(const std::uint8_t* encoded, std::size_t count, float* values,
                                 bool add) {
    const auto* integers = reinterpret_cast<const std::int8_t*>(encoded);
    const std::uint8_t* exponents = encoded + count;
    for (std::size_t start = 0; start < count; start += int8_block) {
        const std::size_t size = std::min(int8_block, count - start);
        const float unit = power(exponents[start / int8_block]);
        const std::int8_t* const integer = integers + start;
        float* const value = values + start;
        if (add) {
            for (std::size_t i = 0; i < size; ++i)
                value[i] += static_cast<float>(integer[i]) * unit;
        } else {
            for (std::size_t i = 0; i < size; ++i) value[i] = static_cast<float>(integer[i]) * unit;
        }
    }
}

}  // namespace syncline
