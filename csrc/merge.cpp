#include "merge.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace syncline {

std::vector<std::int64_t> merge_optimally(std::span<const std::int64_t> ready_ns,
                                          std::span<const std::int64_t> size_bytes,
                                          const CostCurve& cost) {
    const std::size_t count = ready_ns.size();
    if (size_bytes.size() != count) {
        throw std::invalid_argument("as many sizes as ready times are needed");
    }
    std::vector<std::int64_t> offset(count + 1, 0);  // bytes of the first j tensors
    for (std::size_t j = 0; j < count; ++j) {
        if (size_bytes[j] < 0 || (j > 0 && ready_ns[j] < ready_ns[j - 1])) {
            throw std::invalid_argument("sizes must not be negative nor ready times decrease");
        }
        if (size_bytes[j] > std::numeric_limits<std::int64_t>::max() - offset[j]) {
            throw std::invalid_argument("the sizes add up to more than 64 bits hold");
        }
        offset[j + 1] = offset[j] + size_bytes[j];
    }

    std::vector<std::int64_t> finish(count + 1, 0);
    std::vector<std::size_t> cut(count + 1, 0);
    std::size_t first = 0;  // the last cut whose prefix finishes before tensor j is ready
    for (std::size_t j = 1; j <= count; ++j) {
        const std::int64_t ready = ready_ns[j - 1];
        while (first + 1 < j && finish[first + 1] <= ready) ++first;
        const std::int64_t least = cost(size_bytes[j - 1]);
        std::int64_t best = std::numeric_limits<std::int64_t>::max();
        for (std::size_t i = first; i < j; ++i) {
            const std::int64_t start = std::max(finish[i], ready);
            if (start + least >= best) break;  // finish[] does not decrease: nothing better follows
            const std::int64_t candidate = start + cost(offset[j] - offset[i]);
            if (candidate < best) {  // of equals the first, which merges the most
                best = candidate;
                cut[j] = i;
            }
        }
        finish[j] = best;
    }

    std::vector<std::int64_t> last_tensors;
    for (std::size_t j = count; j > 0; j = cut[j]) {
        last_tensors.push_back(static_cast<std::int64_t>(j - 1));
    }
    std::ranges::reverse(last_tensors);
    return last_tensors;
}

}  // namespace syncline
