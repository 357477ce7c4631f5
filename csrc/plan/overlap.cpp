#include "overlap.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "dispatch.hpp"
#include "improve.hpp"
#include "merge.hpp"
#include "rearrange.hpp"

namespace syncline {

namespace {

constexpr std::size_t search_starts = 3;       // sequences that local search starts from
constexpr std::int64_t most_pieces = 64;       // of one tensor, in groups of equal size
constexpr std::int64_t smallest_group = 4096;  // all bytes, divided by this
constexpr std::int64_t run_latencies = 8;      // transmission of a run, in latencies
constexpr std::int32_t longest_run = 512;      // tensors
constexpr std::int64_t unlimited = std::int64_t{1} << 60;

class Planner {
  public:
    Planner(const Gradients& gradients, const OverlapSearch& search)
        : gradients_(gradients), search_(search), budget_(search.budget) {}

    void offer(Messages messages) {
        const std::int64_t end_ns = gradients_.end_ns(messages);
        const auto same = [&](const Start& start) {
            return start.end_ns == end_ns && start.messages.size() == messages.size();
        };
        if (std::ranges::any_of(starts_, same)) return;
        if (starts_.size() == search_starts && end_ns >= starts_.back().end_ns) return;
        starts_.push_back({std::move(messages), end_ns});
        std::ranges::stable_sort(starts_, {}, &Start::end_ns);
        if (starts_.size() > search_starts) starts_.pop_back();
    }

    void offer_groups() {
        const std::int64_t all = gradients_.bytes(gradients_.last_cut());
        for (std::int64_t size = all; size > all / smallest_group; size -= (size + 2) / 3) {
            if (done()) return;
            offer(longest_tail_first(gradients_, groups(size)));
        }
    }

    // The optimal merge if all tensors were equally urgent.
    void offer_merged() {
        std::vector<std::int64_t> ready_ns;
        std::vector<std::int64_t> size_bytes;
        for (std::int32_t i = 0; i < gradients_.count(); ++i) {
            ready_ns.push_back(gradients_.ready_ns(i));
            size_bytes.push_back(gradients_.bytes({i + 1, 0}) - gradients_.bytes({i, 0}));
        }
        Messages merged;
        Cut begin{};
        for (const std::int64_t last : merge_optimally(ready_ns, size_bytes, gradients_.cost())) {
            const Cut end{static_cast<std::int32_t>(last) + 1, 0};
            merged.push_back(gradients_.message(begin, end));
            begin = end;
        }
        offer(longest_tail_first(gradients_, merged));
        offer(std::move(merged));
    }

    // Runs of whole tensors of which little is sent too early: a run occupies the channel as
    // urgently as its most urgent tensor requires, so urgent tensors should go together.
    void offer_runs() {
        std::int64_t longest = 0;
        for (std::int32_t i = 0; i < gradients_.count(); ++i) {
            longest = std::max(longest, gradients_.tail_ns(i));
        }
        for (const double offset : {0.01, 0.1, 0.3, 1.0}) {
            for (const std::int64_t factor : {1, 2}) {
                if (done()) return;
                offer(longest_tail_first(gradients_,
                                         runs(offset * static_cast<double>(longest), factor)));
            }
        }
    }

    void offer_dispatched() {
        const std::int64_t a = gradients_.latency_ns();
        for (const std::int64_t enough : {std::int64_t{1}, a, 4 * a, unlimited}) {
            for (const std::int64_t worthwhile : {std::int64_t{1}, a / 2, a, 3 * a, unlimited}) {
                for (const bool fill : {false, true}) {
                    if (done()) return;
                    bisect_target({0, enough, worthwhile, fill});
                }
            }
        }
    }

    bool solve_exactly() {
        if (gradients_.all_elements() > search_.exact_elements) return false;
        std::vector<Atom> atoms;
        for (std::int64_t e = 0; e < gradients_.all_elements(); ++e) {
            atoms.push_back({gradients_.cut_at(e), gradients_.cut_at(e + 1)});
        }
        Messages found = rearrange(gradients_, atoms, {}, {}, starts_.front().end_ns);
        if (!found.empty()) offer(std::move(found));
        return true;
    }

    void improve_all() {
        const std::vector<Start> starts = starts_;
        const std::int64_t share = budget_ / static_cast<std::int64_t>(2 * starts.size() + 1);
        for (const Start& start : starts) {
            if (done()) return;
            std::int64_t left = share;
            offer(improve(gradients_, start.messages, search_.goal_ns, left, false));
            budget_ -= share - left;
        }
        if (done()) return;
        offer(improve(gradients_, starts_.front().messages, search_.goal_ns, budget_, true));
    }

    [[nodiscard]] bool done() const {
        return !starts_.empty() && starts_.front().end_ns <= search_.goal_ns;
    }

    [[nodiscard]] Messages best() const {
        const Start& best = starts_.front();
        return tidy(gradients_, best.messages, std::max(best.end_ns, search_.goal_ns));
    }

  private:
    struct Start {
        Messages messages;
        std::int64_t end_ns;
    };

    // Slices of about `size` bytes: small neighbours merged, large tensors cut.
    [[nodiscard]] Messages groups(std::int64_t size) const {
        Messages found;
        Cut begin{};
        const auto close = [&](Cut end) {
            if (begin < end) found.push_back(gradients_.message(begin, end));
            begin = end;
        };
        for (std::int32_t i = 0; i < gradients_.count(); ++i) {
            const std::int64_t held = gradients_.bytes({i, 0}) - gradients_.bytes(begin);
            const std::int64_t own = gradients_.bytes({i + 1, 0}) - gradients_.bytes({i, 0});
            if (held > size - own) close({i, 0});
            const std::int64_t elements = gradients_.elements(i);
            const std::int64_t pieces = std::min({(own - 1) / size + 1, elements, most_pieces});
            for (std::int64_t k = 1; k < pieces; ++k) close({i, elements / pieces * k});
        }
        close(gradients_.last_cut());
        return found;
    }

    // The runs of tensors with the least sum of (time on the channel) * (longest tail + offset).
    [[nodiscard]] Messages runs(double offset_ns, std::int64_t factor) const {
        const auto n = static_cast<std::size_t>(gradients_.count());
        const std::int64_t latency = factor * gradients_.latency_ns();
        const std::int64_t enough = run_latencies * latency;
        std::vector<double> sum(n + 1, 0);
        std::vector<std::int32_t> cut(n + 1, 0);
        for (std::size_t j = 1; j <= n; ++j) {
            const Cut end{static_cast<std::int32_t>(j), 0};
            std::int64_t tail = 0;
            sum[j] = std::numeric_limits<double>::infinity();
            const std::int32_t first = std::max(end.tensor - longest_run, 0);
            for (std::int32_t i = end.tensor - 1; i >= first; --i) {
                tail = std::max(tail, gradients_.tail_ns(i));
                const std::int64_t sent =
                    gradients_.transmission_ns(gradients_.bytes(end) - gradients_.bytes({i, 0}));
                const std::int64_t busy =
                    gradients_.overlap() ? std::max(sent, latency) : sent + latency;
                const double with =
                    sum[static_cast<std::size_t>(i)] +
                    static_cast<double>(busy) * (static_cast<double>(tail) + offset_ns);
                if (with < sum[j]) {
                    sum[j] = with;
                    cut[j] = i;
                }
                if (sent > enough) break;
            }
        }
        Messages found;
        for (auto j = gradients_.count(); j > 0; j = cut[static_cast<std::size_t>(j)]) {
            found.push_back(gradients_.message({cut[static_cast<std::size_t>(j)], 0}, {j, 0}));
        }
        std::ranges::reverse(found);
        return found;
    }

    // Finds the least target that the rule meets, by bisection.
    void bisect_target(DispatchRule rule) {
        std::int64_t low = search_.goal_ns;
        std::int64_t high = starts_.front().end_ns;
        const std::int64_t close = std::max<std::int64_t>(high / 2000, 1);
        rule.target_ns = low;
        while (true) {
            Messages messages = dispatch(gradients_, rule);
            const std::int64_t end_ns = gradients_.end_ns(messages);
            offer(std::move(messages));
            if (end_ns <= rule.target_ns) {
                high = std::min(high, end_ns);
            } else {
                low = rule.target_ns + 1;
            }
            if (high - low <= close) return;
            rule.target_ns = low + (high - low) / 2;
        }
    }

    const Gradients& gradients_;
    const OverlapSearch search_;
    std::int64_t budget_;
    std::vector<Start> starts_;  // the best so far, best first
};

}  // namespace

Messages plan_overlap(const Gradients& gradients, const std::vector<Messages>& seeds,
                      const OverlapSearch& search) {
    Planner planner(gradients, search);
    for (const Messages& seed : seeds) planner.offer(seed);
    planner.offer_groups();
    planner.offer_merged();
    planner.offer_runs();
    planner.offer_dispatched();
    if (!planner.done() && !planner.solve_exactly()) planner.improve_all();
    return planner.best();
}

}  // namespace syncline
