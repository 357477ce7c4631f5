// A non-decreasing piecewise linear cost of a message, in integer nanoseconds.
#pragma once

#include <cstdint>
#include <vector>

namespace syncline {

struct CostSegment {
    std::int64_t start_bytes;
    double cost_ns;      // at start_bytes
    double ns_per_byte;  // from there to the next segment
};

// T(M): what exchanging one message of M bytes costs. MG-WFBP, Eq. 10, is the single-segment case.
class CostCurve {
  public:
    // Throws std::invalid_argument if there is no segment or the first does not start at 0 bytes.
    explicit CostCurve(std::vector<CostSegment> segments);

    // Cost in nanoseconds, rounded to the nearest; non-decreasing in size_bytes.
    [[nodiscard]] std::int64_t operator()(std::int64_t size_bytes) const;

  private:
    std::vector<CostSegment> segments_;
};

}  // namespace syncline
