// Ascending indices as distances of 16 bits.
//
// Each index is coded as its distance from the one before (the first as from -1), less one. A
// distance below 65,535 takes two bytes; a longer one takes six: 65,535, then its 32 bits. All are
// little-endian. Distances add up to at most the length of the vector, so k indices of n take at
// most 2 k + 4 floor(n / 65,536) bytes: known beforehand, without a look at them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "recycled.hpp"

namespace syncline {

// The most that `count` indices below `universe` take.
[[nodiscard]] std::size_t longest_code(std::size_t count, std::size_t universe);

// The indices ascend.
[[nodiscard]] RecycledVector<std::byte> coded(std::span<const std::uint32_t> indices);

// Read `count` indices into `indices`. Returns how many bytes they took. Throws
// std::invalid_argument if the bytes end early or an index is not below the universe.
std::size_t decode(std::span<const std::byte> bytes, std::size_t universe,
                   std::span<std::uint32_t> indices);

}  // namespace syncline
