#include "merge.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace syncline {

namespace {

// Later ones would leave no room for two messages after them.
constexpr std::int64_t latest_ns = std::numeric_limits<std::int64_t>::max() - 4 * longest_ns;

// Lower bounds on the finish after a cut, for runs of cuts. With f(i) the finish of the first i
// tensors and o(i) their bytes, a message of tensors i+1 .. j whose size lies in one segment of the
// cost ends at
//
//   f(i) + cost + slope (o(j) - o(i) - start)   =   [f(i) - slope o(i)] + [what depends on j alone]
//
// so the least f(i) - slope o(i) of a run bounds all of it. Runs have run_length, run_length^2, ...
// cuts.
class Runs {
  public:
    Runs(const CostCurve& cost, const std::vector<std::int64_t>& finish,
         const std::vector<std::int64_t>& offset)
        : cost_(cost), finish_(finish), offset_(offset), least_(cost.segments().size()) {
        for (std::size_t cuts = run_length; cuts < finish.size(); cuts *= run_length) {
            for (auto& of_segment : least_) {
                of_segment.emplace_back(finish.size() / cuts,
                                        std::numeric_limits<double>::infinity());
            }
        }
    }

    // The finish of the first i tensors is known; i goes up from 0.
    void add(std::size_t i) {
        for (std::size_t k = 0; k < least_.size(); ++k) {
            const double value = static_cast<double>(finish_[i]) -
                                 cost_.segments()[k].ns_per_byte * static_cast<double>(offset_[i]);
            std::size_t run = i;
            for (std::vector<double>& least : least_[k]) {
                run /= run_length;
                if (run < least.size()) least[run] = std::min(least[run], value);
            }
        }
    }

    // Returns the end of the longest run from i on in which no cut lets the first j tensors finish
    // before `best`; i if there is none. A message starts at its cut's finish.
    [[nodiscard]] std::size_t skip(std::size_t i, std::size_t j, std::int64_t best) const {
        std::size_t end = i;
        std::size_t cuts = run_length;
        for (std::size_t level = 0; level < least_.front().size(); ++level, cuts *= run_length) {
            if (i % cuts != 0 || i + cuts > j || !hopeless(i, cuts, level, j, best)) break;
            end = i + cuts;
        }
        return end;
    }

  private:
    static constexpr std::size_t run_length = 16;
    static constexpr double roundings = 16 * std::numeric_limits<double>::epsilon();

    [[nodiscard]] bool hopeless(std::size_t i, std::size_t cuts, std::size_t level, std::size_t j,
                                std::int64_t best) const {
        const std::int64_t smallest = offset_[j] - offset_[i + cuts - 1];
        const std::int64_t largest = offset_[j] - offset_[i];
        if (finish_[i] + cost_(smallest) >= best) return true;
        const std::size_t k = cost_.segment(smallest);
        if (k != cost_.segment(largest) || cost_(largest) > longest_ns) return false;
        const CostSegment& segment = cost_.segments()[k];
        const double all = segment.ns_per_byte * static_cast<double>(offset_[j]);
        const double before = segment.ns_per_byte * static_cast<double>(segment.start_bytes);
        const double bound = least_[k][level][i / cuts] + all + segment.cost_ns - before;
        // A cost is rounded to the nearest nanosecond, and these sums by the size of their terms.
        const double terms = static_cast<double>(finish_[j - 1]) + std::abs(all) +
                             std::abs(segment.cost_ns) + std::abs(before);
        return bound - 0.5 - roundings * terms > static_cast<double>(best - 1);
    }

    const CostCurve& cost_;
    const std::vector<std::int64_t>& finish_;
    const std::vector<std::int64_t>& offset_;
    std::vector<std::vector<std::vector<double>>> least_;  // by segment, level and run
};

}  // namespace

std::vector<std::int64_t> merge_optimally(std::span<const std::int64_t> ready_ns,
                                          std::span<const std::int64_t> size_bytes,
                                          const CostCurve& cost) {
    const std::size_t count = ready_ns.size();
    if (size_bytes.size() != count) {
        throw std::invalid_argument("as many sizes as ready times are needed");
    }
    if (count > 0 && ready_ns.back() > latest_ns) {
        throw std::invalid_argument("a tensor is ready later than 64 bits hold in nanoseconds");
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
    Runs runs(cost, finish, offset);
    std::size_t first = 0;  // the last cut whose prefix finishes before tensor j is ready
    for (std::size_t j = 1; j <= count; ++j) {
        const std::int64_t ready = ready_ns[j - 1];
        while (first + 1 < j && finish[first + 1] <= ready) ++first;
        runs.add(j - 1);
        const std::int64_t least = cost(size_bytes[j - 1]);
        const auto start = [&](std::size_t i) { return std::max(finish[i], ready); };
        const auto stop = [&](std::size_t i) { return start(i) + cost(offset[j] - offset[i]); };
        // The best cut is most likely near the one before: worse ones are skipped. Cuts that are
        // as good are found below; the first of them is taken, which merges the most.
        const std::size_t near = std::max(first, cut[j - 1]);
        std::int64_t best = std::min(stop(near), stop(std::min(near + 1, j - 1))) + 1;
        for (std::size_t i = first; i < j;) {
            if (start(i) + least >= best) break;  // finish[] does not decrease: nothing better
            const std::size_t next = i > first ? runs.skip(i, j, best) : i;
            if (next > i) {
                i = next;
                continue;
            }
            if (stop(i) < best) {
                best = stop(i);
                cut[j] = i;
            }
            ++i;
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
