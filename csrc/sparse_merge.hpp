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

// The k entries of largest magnitude (of equal ones those of lower index), and the others.
[[nodiscard]] Kept keep_largest(SparseVector&& sum, std::size_t k);

struct Divided {
    SparseVector chosen;
    SparseVector others;
};

// The entries whose indices are among those given, which ascend, and the others.
[[nodiscard]] Divided divided(const SparseView& entries, std::span<const std::uint32_t> indices);

}  // namespace syncline
