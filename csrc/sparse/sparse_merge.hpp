// Adding sparse vectors, and what is left of a sum once only its largest entries are kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sparse_vector.hpp"

namespace syncline {

// a + b. Entries of both are added; a sum that is exactly zero is no entry. Commutative, bit for
// bit, but for NaN's payload.
[[nodiscard]] SparseVector sum_of(const SparseView& a, const SparseView& b);

struct Kept {
    SparseVector kept;
    SparseVector dropped;
};

// A part of a vector, from where the part before it ends; at most k of its entries are kept.
struct Quota {
    std::uint64_t end;
    std::uint64_t k;
};

// Of every part its k entries of largest magnitude (of equal ones those of lower index), and the
// others. Throws std::invalid_argument if an entry is beyond the last part.
[[nodiscard]] Kept keep_largest(SparseVector&& sum, std::span<const Quota> parts);

struct Divided {
    SparseVector chosen;
    SparseVector others;
};

// The entries whose indices are among those given, which ascend, and the others.
[[nodiscard]] Divided divided(const SparseView& entries, std::span<const std::uint32_t> indices);

}  // namespace syncline
