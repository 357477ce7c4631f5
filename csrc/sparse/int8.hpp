// Floats as 8-bit integers, in blocks that share an exponent. The format is described in
// src/syncline/train/engine/int8.py, whose operations of torch give the same bits on any device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

inline constexpr std::size_t int8_block = 128;  // elements that share an exponent

// Multiplies values by a factor, adds the residuals of those that are not zero, and clears these
// residuals. If a block becomes infinite or NaN, all of its residuals are cleared.
void int8_take(float* values, float* residual, std::size_t count, float factor);

// The same, and then rounds the values to 8 bits: `encoded` gets `count` integers and one exponent
// for each block, the values become what these stand for, and the residuals what rounding loses.
void int8_encode(float* values, float* residual, std::size_t count, float factor,
                 std::uint8_t* encoded);

// Replaces `count` values by what is encoded, or adds it to them.
void int8_decode(const std::uint8_t* encoded, std::size_t count, float* values, bool add);

}  // namespace syncline
