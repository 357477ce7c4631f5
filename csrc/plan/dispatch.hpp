// Cutting and ordering messages in one pass, most urgent first, towards a given end.
#pragma once

#include <cstdint>

#include "gradients.hpp"

namespace syncline {

struct DispatchRule {
    std::int64_t target_ns;      // the end aimed at: tensor i is due at target - tail
    std::int64_t enough_ns;      // merge until a message transmits for this long
    std::int64_t worthwhile_ns;  // send a piece before an urgent tensor if it takes this long
    bool fill;                   // fill a message up with a piece of a neighbouring tensor
};

// Sends the ready tensor with the longest tail (Jackson's rule), merged with ready neighbours while
// that makes nothing late, and cut or held back where a more urgent tensor would otherwise come too
// late. Missing the target is no failure: the sequence is complete in any case.
//
// O(M log n + looked-ahead tensors) for M messages.
[[nodiscard]] Messages dispatch(const Gradients& gradients, const DispatchRule& rule);

// Orders given messages without cutting them: of those that are ready, or will be before the
// channel can take one, the one with the longest tail (Schrage's rule), O(M log M). `messages` must
// be sorted by begin, which sorts them by readiness too.
[[nodiscard]] Messages longest_tail_first(const Gradients& gradients, const Messages& messages);

}  // namespace syncline
