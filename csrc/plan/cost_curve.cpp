#include "cost_curve.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace syncline {

namespace {

constexpr auto most = static_cast<double>(longest_ns + 1);

}  // namespace

CostCurve::CostCurve(std::vector<CostSegment> segments) : segments_(std::move(segments)) {
    if (segments_.empty() || segments_.front().start_bytes != 0) {
        throw std::invalid_argument("a cost curve needs a first segment that starts at 0 bytes");
    }
    for (std::size_t i = 1; i < segments_.size(); ++i) {
        if (segments_[i].start_bytes <= segments_[i - 1].start_bytes) {
            throw std::invalid_argument("the segments of a cost curve must be in increasing order");
        }
    }
    // A slope can be infinite, and infinity times no bytes is no number.
    for (CostSegment& each : segments_) each.ns_per_byte = std::min(each.ns_per_byte, most);
}

std::size_t CostCurve::segment(std::int64_t size_bytes) const {
    // Measured curves have a handful of segments: a backward scan beats a binary search.
    std::size_t index = segments_.size() - 1;
    while (index > 0 && segments_[index].start_bytes > size_bytes) --index;
    return index;
}

std::int64_t CostCurve::operator()(std::int64_t size_bytes) const {
    const CostSegment& of_size = segments_[segment(size_bytes)];
    const double offset = static_cast<double>(size_bytes - of_size.start_bytes);
    const double cost_ns = of_size.cost_ns + of_size.ns_per_byte * offset;
    return cost_ns < most ? std::llround(cost_ns) : longest_ns + 1;
}

}  // namespace syncline
