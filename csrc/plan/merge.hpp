// The exact optimum of merging gradients for backward-only exchange.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cost_curve.hpp"

namespace syncline {

// Returns the increasing indices of the last tensor of each message, such that the last message
// finishes as early as possible on one channel that sends messages in ready order.
//
//   f(0) = 0,   f(j) = min over i < j of  max(f(i), ready(j)) + T(size of tensors i+1 .. j)
//
// Exact for every non-decreasing T: an earlier finish of a prefix never delays what follows it.
//
// ready_ns: non-decreasing; size_bytes: non-negative; both of the same length.
// Since f does not decrease, only cuts at or after the last one that finishes before ready(j) can
// win (earlier ones start no sooner and send more), and the scan stops once even the last tensor
// alone could not beat the best finish. Between these, runs of cuts that cannot win are skipped: in
// practice O(N log N), also where all tensors are ready at once; O(N^2) in the worst case.
[[nodiscard]] std::vector<std::int64_t> merge_optimally(std::span<const std::int64_t> ready_ns,
                                                        std::span<const std::int64_t> size_bytes,
                                                        const CostCurve& cost);

}  // namespace syncline
