// Local search on a sequence of messages: around what ends the round.
#pragma once

#include <cstdint>

#include "gradients.hpp"

namespace syncline {

// Improves `messages` until no change that is tried helps, the round ends at `goal_ns` or before,
// or the budget is spent. These changes are tried, each judged exactly: moving a message of the
// critical block across others, merging it with a neighbouring slice, handing a part of it to a
// neighbour, sending a part of it earlier or later, and rearranging a few successive messages in
// the best possible way. With `restart`, when nothing helps, a few random changes are made to the
// best sequence and it starts again, until the budget is spent. Finally, boundaries are shifted
// until the message that ends last ends together with the one that would end last instead.
//
// budget: messages looked at in all; it is decreased. Deterministic.
[[nodiscard]] Messages improve(const Gradients& gradients, Messages messages, std::int64_t goal_ns,
                               std::int64_t& budget, bool restart);

// Merges neighbouring slices while the round still ends at `limit_ns` or before: fewer messages for
// the same end. O(M^2) at worst, within a fixed budget; O(M) for slices sent in succession.
[[nodiscard]] Messages tidy(const Gradients& gradients, Messages messages, std::int64_t limit_ns);

}  // namespace syncline
