// A piecewise linear cost of a message, in integer nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncline {

// The longest task and the most expensive message, 19.5 hours: sums of many stay within 64 bits.
inline constexpr std::int64_t longest_ns = std::int64_t{1} << 46;

struct CostSegment {
    std::int64_t start_bytes;
    double cost_ns;      // at start_bytes
    double ns_per_byte;  // from there to the next segment
};

// T(M): what exchanging one message of M bytes costs. MG-WFBP, Eq. 10, is the single-segment case.
class CostCurve {
  public:
    // Throws std::invalid_argument if there is no segment, the first does not start at 0 bytes or
    // starts do not increase.
    explicit CostCurve(std::vector<CostSegment> segments);

    // Cost in nanoseconds, rounded to the nearest, at most longest_ns + 1.
    [[nodiscard]] std::int64_t operator()(std::int64_t size_bytes) const;

    [[nodiscard]] const std::vector<CostSegment>& segments() const { return segments_; }
    // The index of the segment that a size lies in.
    [[nodiscard]] std::size_t segment(std::int64_t size_bytes) const;

  private:
    std::vector<CostSegment> segments_;
};

}  // namespace syncline
