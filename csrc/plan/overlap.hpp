// Merging, splitting and ordering gradients together, for the steady state across two passes.
#pragma once

#include <cstdint>
#include <vector>

#include "gradients.hpp"

namespace syncline {

struct OverlapSearch {
    // The search ends once the round ends by then: a lower bound, or early enough to be of use.
    std::int64_t goal_ns = 0;
    // Messages looked at by local search, which decides how long it takes: about 10 ns each.
    std::int64_t budget = 10'000'000;
    // Rounds of at most this many elements are solved exactly; at most most_atoms.
    std::int64_t exact_elements = 12;
};

// Searches for messages, in the order in which they are sent, such that the round ends early:
//
// 1. Seeds: `seeds`; groups of every size in a geometric grid, longest tail first; the merge that
//    finishes first; runs of tensors that are about as urgent; `dispatch` under forty rules, each
//    bisecting the end that it aims at.
// 2. `improve` on the three best, and with random restarts on the best of all; or, for a round of
//    few elements, the optimum by `rearrange`.
// 3. `tidy`: fewer messages where that costs nothing.
//
// The result is no worse than any seed, and the same on every machine.
[[nodiscard]] Messages plan_overlap(const Gradients& gradients, const std::vector<Messages>& seeds,
                                    const OverlapSearch& search);

}  // namespace syncline
