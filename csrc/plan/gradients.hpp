// The gradients of one round, cut into messages anywhere.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "channel.hpp"
#include "cost_curve.hpp"

namespace syncline {

// One round of gradients in ready order, as plan/simulator/bound.py states it. No tensor is empty.
struct Round {
    std::vector<std::int64_t> ready_ns;       // non-decreasing
    std::vector<std::int64_t> elements;       // at least 1
    std::vector<std::int64_t> element_bytes;  // at least 1
    std::vector<std::int64_t> tail_ns;        // from the arrival to the end of the round
    std::int32_t in_flight = 1;               // 1 or 2
};

// A place between two elements: before element `element` of a tensor, and never at a tensor's end,
// which is the place before element 0 of the next.
struct Cut {
    std::int32_t tensor = 0;
    std::int64_t element = 0;
    auto operator<=>(const Cut&) const = default;
};

struct Message : Transfer {
    Cut begin;
    Cut end;
};

using Messages = std::vector<Message>;

// Answers, for any slice of the gradients, what sending it takes.
class Gradients {
  public:
    // Throws std::invalid_argument for lengths that differ, values out of range, decreasing ready
    // times, or costs too large to add up.
    Gradients(const Round& round, const CostCurve& cost);

    [[nodiscard]] std::int32_t count() const { return static_cast<std::int32_t>(ready_.size()); }
    [[nodiscard]] std::int64_t ready_ns(std::int32_t tensor) const { return ready_[at(tensor)]; }
    [[nodiscard]] std::int64_t tail_ns(std::int32_t tensor) const { return tails_[0][at(tensor)]; }
    [[nodiscard]] std::int64_t elements(std::int32_t tensor) const { return elements_[at(tensor)]; }
    [[nodiscard]] std::int64_t all_elements() const { return offset_elements_.back(); }
    [[nodiscard]] const CostCurve& cost() const { return cost_; }
    [[nodiscard]] std::int64_t latency_ns() const { return latency_ns_; }
    // Whether the latency of a message overlaps the transmission of another: two in flight.
    [[nodiscard]] bool overlap() const { return overlap_; }

    // The place before element `element` of `tensor`; element may be that after its last.
    [[nodiscard]] Cut cut(std::int32_t tensor, std::int64_t element) const {
        return element < elements_[at(tensor)] ? Cut{tensor, element} : Cut{tensor + 1, 0};
    }
    [[nodiscard]] Cut last_cut() const { return {count(), 0}; }
    // The place before that element of the concatenated gradients, and back. O(log n).
    [[nodiscard]] Cut cut_at(std::int64_t element) const;
    [[nodiscard]] std::int64_t element(Cut cut) const {
        return offset_elements_[at(cut.tensor)] + cut.element;
    }

    [[nodiscard]] std::int64_t bytes(Cut cut) const {
        return offset_bytes_[at(cut.tensor)] + cut.element * element_bytes_[at(cut.tensor)];
    }
    [[nodiscard]] std::int64_t transmission_ns(std::int64_t bytes) const {
        return cost_(bytes) - latency_ns_;
    }
    // The message over [begin, end), begin < end. O(segments of the cost curve).
    [[nodiscard]] Message message(Cut begin, Cut end) const;

    // The furthest cut in [from, to] such that the transmission of [from, cut) takes at most
    // `limit_ns`; `from` and `to` must lie in one tensor or at its end. O(log elements).
    [[nodiscard]] Cut furthest(Cut from, Cut to, std::int64_t limit_ns) const;
    // Likewise the first cut in [from, to] such that [cut, to) does.
    [[nodiscard]] Cut nearest(Cut from, Cut to, std::int64_t limit_ns) const;
    // The element boundary at `share` of the bytes of [begin, end), strictly inside; `begin` if
    // there is none.
    [[nodiscard]] Cut inside(Cut begin, Cut end, double share) const;

    // When the round ends: max over the messages of arrival + tail.
    [[nodiscard]] std::int64_t end_ns(const Messages& messages) const;

  private:
    static std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

    CostCurve cost_;
    std::vector<std::int64_t> ready_;
    std::vector<std::int64_t> elements_;
    std::vector<std::int64_t> element_bytes_;  // and a last one, so that the last cut has one
    std::vector<std::int64_t> offset_bytes_;   // of all tensors before, and of all
    std::vector<std::int64_t> offset_elements_;
    std::vector<std::vector<std::int64_t>> tails_;  // [k][i]: the largest of tensors i .. i + 2^k
    std::int64_t latency_ns_;
    bool overlap_;
};

}  // namespace syncline
