// PACE: the order of preemptive all-reduces, and the fusion of tensors into balanced groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cost_curve.hpp"

namespace syncline {

// A tensor, or a group of tensors that are fused, on its way through one channel.
struct Job {
    std::int64_t ready_ns;  // it may not be sent earlier
    std::int64_t cost_ns;   // how long the channel is busy with it
    std::int64_t tail_ns;   // what must still be computed once it has arrived
};

// A part of a job that is sent without interruption.
struct Piece {
    std::size_t job;
    std::int64_t start_ns;
    std::int64_t stop_ns;
};

struct PreemptiveOrder {
    std::int64_t end_ns = 0;  // max over the jobs of (arrival + tail)
    std::vector<Piece> pieces;
};

// The most jobs and tensors that are planned: the sums of their times stay within 64 bits, and the
// table of the fusion within a quarter of a gigabyte.
inline constexpr std::size_t most_jobs = std::size_t{1} << 14;

// Returns the order that minimises max(arrival + tail) where a job may be interrupted at any moment
// and taken up again later at no cost: the ready job with the longest tail is sent, always
// (Jackson's rule; 1|r_j, pmtn|max(C_j + q_j)). At equal tails the first listed goes. A job without
// cost has a piece of no length. O(N log N); at most one interruption an arrival, so fewer than 2 N
// pieces.
//
// Throws std::invalid_argument if a time is negative or beyond twice longest_ns, or if there are
// more than most_jobs.
[[nodiscard]] PreemptiveOrder preemptive_order(std::span<const Job> jobs);

// Returns the last tensor of each group that PACE, Algorithm 1, fuses: of the partitions of the
// chain into R groups whose smallest group is as large as possible, for every R from 1 to N, the
// first whose preemptive order ends soonest. A group is ready with its last tensor, costs what one
// message of its size does and has the longest tail of its tensors; an iteration takes at least
// base_ns.
//
// The partitions are exactly those of the published recursion, from one table: in row R, the value
// and the first cut of every suffix of the chain,
//
//   V(s, R) = max over k of  min(size of tensors s .. k-1, V(k, R - 1)).
//
// The size grows with k and V falls, so they cross once, and the crossing moves left with s: each
// row takes O(N). All in all O(N^2) for the table, at two bytes an entry, and O(N^2 log N) for the
// orders. Rows are made while a larger R can still win: it ends no sooner than R latencies after
// the first tensor is ready, and nothing ends sooner than each tensor by itself would.
//
// ready_ns: non-decreasing; size_bytes: positive, unless there is only one tensor.
// Throws std::invalid_argument as preemptive_order does, and if the lengths differ, ready times
// decrease or a size is not positive.
[[nodiscard]] std::vector<std::int64_t> fuse_balanced(std::span<const std::int64_t> ready_ns,
                                                      std::span<const std::int64_t> size_bytes,
                                                      std::span<const std::int64_t> tail_ns,
                                                      std::int64_t base_ns, const CostCurve& cost);

}  // namespace syncline
