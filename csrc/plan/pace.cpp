#include "pace.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <utility>

namespace syncline {

namespace {

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

// Twice the longest: sums of rounded times can be a little longer than the time they add up to.
bool is_time(std::int64_t ns) { return ns >= 0 && ns <= 2 * longest_ns; }

// Runs jobs by Jackson's rule. `arrivals` lists the jobs by ready time; `piece` is called with
// (job, start, stop) for whatever runs without interruption.
template <typename OnPiece>
std::int64_t run_by_longest_tail(std::span<const Job> jobs, std::span<const std::size_t> arrivals,
                                 OnPiece piece) {
    std::vector<std::int64_t> left(jobs.size());
    const auto less_urgent = [&jobs](std::size_t a, std::size_t b) {
        return jobs[a].tail_ns != jobs[b].tail_ns ? jobs[a].tail_ns < jobs[b].tail_ns : a > b;
    };
    std::priority_queue<std::size_t, std::vector<std::size_t>, decltype(less_urgent)> ready(
        less_urgent);
    std::int64_t now = 0;
    std::int64_t end = 0;
    std::size_t next = 0;
    while (next < arrivals.size() || !ready.empty()) {
        if (ready.empty()) now = std::max(now, jobs[arrivals[next]].ready_ns);
        for (; next < arrivals.size() && jobs[arrivals[next]].ready_ns <= now; ++next) {
            left[arrivals[next]] = jobs[arrivals[next]].cost_ns;
            ready.push(arrivals[next]);
        }
        const std::size_t job = ready.top();
        const std::int64_t until = next < arrivals.size() ? jobs[arrivals[next]].ready_ns : most;
        const std::int64_t sent = std::min(left[job], until - now);
        piece(job, now, now + sent);  // of no length only for a job that costs nothing
        now += sent;
        left[job] -= sent;
        if (left[job] == 0) {
            ready.pop();
            end = std::max(end, now + jobs[job].tail_ns);
        }
    }
    return end;
}

void check(std::span<const Job> jobs) {
    if (jobs.size() > most_jobs) throw std::invalid_argument("too many jobs to plan");
    for (const Job& job : jobs) {
        if (!is_time(job.ready_ns) || !is_time(job.cost_ns) || !is_time(job.tail_ns)) {
            throw std::invalid_argument("a time of a job is negative or too long");
        }
    }
}

// The table of the max-min partitions of a chain, a row for each number of groups.
class BalancedGroups {
  public:
    explicit BalancedGroups(std::span<const std::int64_t> size_bytes)
        : offset_(size_bytes.size() + 1, 0) {
        for (std::size_t i = 0; i < size_bytes.size(); ++i) {
            if (size_bytes[i] > most - offset_[i]) {
                throw std::invalid_argument("the sizes add up to more than 64 bits hold");
            }
            offset_[i + 1] = offset_[i] + size_bytes[i];
        }
        const std::int64_t total = offset_.back();
        smallest_.resize(size_bytes.size());
        for (std::size_t s = 0; s < size_bytes.size(); ++s) smallest_[s] = total - offset_[s];
    }

    // Bytes of tensors first .. stop - 1.
    [[nodiscard]] std::int64_t bytes(std::size_t first, std::size_t stop) const {
        return offset_[stop] - offset_[first];
    }

    // Writes where each of `groups` groups stops; to be called for 1, 2, 3, ... in this order.
    void stops(std::size_t groups, std::vector<std::size_t>& into) {
        if (groups > 1) add_row(groups);
        into.clear();
        std::size_t first = 0;
        for (std::size_t left = groups; left > 1; --left) {
            first = cuts_[left - 2][first];
            into.push_back(first);
        }
        into.push_back(offset_.size() - 1);
    }

  private:
    // Fills the row of `groups` groups and replaces smallest_, V(., groups - 1), by V(., groups).
    void add_row(std::size_t groups) {
        const std::size_t count = offset_.size() - 1;
        const std::size_t last_cut = count - groups + 1;  // leaves a tensor for each further group
        std::vector<std::uint16_t> row(last_cut);
        // The first cut whose prefix holds at least what the rest can: one past the last if none.
        std::size_t crossing = last_cut + 1;
        std::vector<std::int64_t> smallest(last_cut);
        for (std::size_t s = last_cut; s-- > 0;) {
            while (crossing > s + 1 && bytes(s, crossing - 1) >= smallest_[crossing - 1])
                --crossing;
            const std::int64_t before = crossing > s + 1 ? bytes(s, crossing - 1) : -1;
            const std::int64_t after = crossing <= last_cut ? smallest_[crossing] : -1;
            row[s] = static_cast<std::uint16_t>(before >= after ? crossing - 1 : crossing);
            smallest[s] = std::max(before, after);
        }
        cuts_.push_back(std::move(row));
        smallest_ = std::move(smallest);
    }

    std::vector<std::int64_t> offset_;    // bytes of the first j tensors
    std::vector<std::int64_t> smallest_;  // V(s, R) of the row made last
    std::vector<std::vector<std::uint16_t>> cuts_;
};

}  // namespace

PreemptiveOrder preemptive_order(std::span<const Job> jobs) {
    check(jobs);
    std::vector<std::size_t> arrivals(jobs.size());
    std::iota(arrivals.begin(), arrivals.end(), std::size_t{0});
    std::ranges::stable_sort(arrivals, {}, [&](std::size_t job) { return jobs[job].ready_ns; });
    PreemptiveOrder order;
    order.end_ns = run_by_longest_tail(
        jobs, arrivals, [&](std::size_t job, std::int64_t start, std::int64_t stop) {
            // A job that no arrival displaced goes on in one piece.
            if (!order.pieces.empty() && order.pieces.back().job == job &&
                order.pieces.back().stop_ns == start) {
                order.pieces.back().stop_ns = stop;
            } else {
                order.pieces.push_back({job, start, stop});
            }
        });
    return order;
}

std::vector<std::int64_t> fuse_balanced(std::span<const std::int64_t> ready_ns,
                                        std::span<const std::int64_t> size_bytes,
                                        std::span<const std::int64_t> tail_ns, std::int64_t base_ns,
                                        const CostCurve& cost) {
    const std::size_t count = ready_ns.size();
    if (size_bytes.size() != count || tail_ns.size() != count) {
        throw std::invalid_argument("as many sizes and tails as ready times are needed");
    }
    if (count == 0) return {};
    std::vector<Job> alone(count);
    std::int64_t least = base_ns;  // no grouping ends sooner
    for (std::size_t i = 0; i < count; ++i) {
        if (size_bytes[i] < 0 || (size_bytes[i] == 0 && count > 1) ||
            (i > 0 && ready_ns[i] < ready_ns[i - 1])) {
            throw std::invalid_argument("sizes must be positive and ready times not decrease");
        }
        alone[i] = {ready_ns[i], cost(size_bytes[i]), tail_ns[i]};
    }
    check(alone);
    for (const Job& job : alone) {
        least = std::max(least, job.ready_ns + job.cost_ns + job.tail_ns);
    }
    const std::int64_t latency = cost(0);
    const std::int64_t shortest_tail = *std::ranges::min_element(tail_ns);

    BalancedGroups balanced(size_bytes);
    std::vector<std::size_t> stops;
    std::vector<std::size_t> best_stops;
    std::int64_t best = most;
    std::vector<Job> groups;
    std::vector<std::size_t> arrivals;
    for (std::size_t number = 1; number <= count; ++number) {
        const std::int64_t soonest =
            ready_ns[0] + static_cast<std::int64_t>(number) * latency + shortest_tail;
        if (best <= std::max(least, soonest)) break;
        balanced.stops(number, stops);
        groups.clear();
        std::size_t first = 0;
        for (const std::size_t stop : stops) {
            const auto tails = tail_ns.subspan(first, stop - first);
            groups.push_back({ready_ns[stop - 1], cost(balanced.bytes(first, stop)),
                              *std::ranges::max_element(tails)});
            first = stop;
        }
        arrivals.push_back(number - 1);  // groups are listed by ready time
        const auto ignore = [](std::size_t, std::int64_t, std::int64_t) {};
        const std::int64_t end = std::max(base_ns, run_by_longest_tail(groups, arrivals, ignore));
        if (end < best) {  // Algorithm 1, line 7: of equals the first
            best = end;
            best_stops = stops;
        }
    }
    std::vector<std::int64_t> last_tensors;
    last_tensors.reserve(best_stops.size());
    for (const std::size_t stop : best_stops) {
        last_tensors.push_back(static_cast<std::int64_t>(stop) - 1);
    }
    return last_tensors;
}

}  // namespace syncline
