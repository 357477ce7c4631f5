// Reduce-scatters and all-gathers in an order, for rounds whose updates wait for all sums.
#pragma once

#include <cstdint>
#include <vector>

#include "cost_curve.hpp"

namespace syncline {

// What is exchanged in a round, and what that costs.
struct DecoupledRound {
    std::vector<std::int64_t> ready_ns;  // of each tensor; non-decreasing
    std::vector<std::int64_t> size_bytes;
    std::vector<std::int64_t> tail_ns;
    std::vector<std::int64_t> need;  // the least is needed first
    CostCurve half;                  // of a reduce-scatter, and of an all-gather
    std::int64_t gap_ns = 0;         // between messages, one at a time
    std::int64_t norm_ns = 0;        // of the exchange of norms
    std::int32_t in_flight = 1;      // 1 or 2
    bool gathers_last = false;       // all-gathers wait for the last sum, and the norm

    // Throws std::invalid_argument if there are no tensors, or they are not a valid round.
    void check() const;
};

// A reduce-scatter of one group of tensors, or an all-gather of neighbouring groups.
struct Half {
    std::int32_t first = 0;
    std::int32_t last = 0;
    bool gathered = false;
};

struct DecoupledPlan {
    std::vector<std::int32_t> lasts;  // the last tensor of each group
    std::vector<Half> order;          // of sending
    std::int64_t end_ns = 0;
};

// When a round ends: the largest arrival, or norm, plus tail. Reduce-scatters are sent in ready
// order; the norms follow the last one; each all-gather follows the sums that it distributes.
// Throws std::invalid_argument if the plan does not fit the round.
[[nodiscard]] std::int64_t decoupled_end(const DecoupledRound& round,
                                         const std::vector<std::int32_t>& lasts,
                                         const std::vector<Half>& order);

// Searches for groups and an order such that the round ends early; see plan/planners/decoupled.py.
//
// seeds: the last tensors of groups to begin with; of at most eight tensors, all groups are tried.
// budget: orders that are evaluated, about a microsecond each for 100 messages.
[[nodiscard]] DecoupledPlan plan_decoupled(const DecoupledRound& round,
                                           const std::vector<std::vector<std::int32_t>>& seeds,
                                           std::int64_t budget);

}  // namespace syncline
