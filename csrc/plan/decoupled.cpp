#include "decoupled.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace syncline {

namespace {

constexpr std::size_t exact_tensors = 8;
constexpr std::size_t improved_plans = 4;
constexpr std::array<std::int64_t, 6> steps{-8, -3, -1, 1, 3, 8};

// The groups of a round, with all that the end of an order depends on.
class Schedule {
  public:
    Schedule(const DecoupledRound& round, const std::vector<std::int32_t>& lasts) : round_(round) {
        std::size_t tensor = 0;
        bytes_before_.push_back(0);
        for (const std::int32_t last : lasts) {
            Group group{0, 0, round.need[tensor]};
            std::int64_t bytes = bytes_before_.back();
            for (; tensor <= static_cast<std::size_t>(last); ++tensor) {
                group.ready_ns = std::max(group.ready_ns, round.ready_ns[tensor]);
                group.tail_ns = std::max(group.tail_ns, round.tail_ns[tensor]);
                group.need = std::min(group.need, round.need[tensor]);
                bytes += round.size_bytes[tensor];
            }
            groups_.push_back(group);
            bytes_before_.push_back(bytes);
        }
        const std::int64_t latency = round.half(0);
        latency_ns_ = round.in_flight > 1 ? latency : 0;
        for (std::size_t g = 0; g < groups_.size(); ++g) own_ns_.push_back(cost_ns(g, g));
        summed_ns_.resize(groups_.size());
    }

    [[nodiscard]] std::size_t size() const { return groups_.size(); }

    // Reduce-scatters in ready order, and an all-gather wherever the channel would be idle for it;
    // with `fill`, also if that delays the next reduce-scatter. The others follow in need order.
    [[nodiscard]] std::vector<Half> greedy(bool fill) const {
        std::vector<Half> order;
        std::vector<std::size_t> summed;  // the most urgent last
        const auto later = [this](std::size_t a, std::size_t b) {
            return std::tuple(groups_[a].need, b) > std::tuple(groups_[b].need, a);
        };
        std::int64_t now = 0;
        const auto gather = [&] {
            const auto group = static_cast<std::int32_t>(summed.back());
            summed.pop_back();
            order.push_back({group, group, true});
        };
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            while (!round_.gathers_last && !summed.empty() && now < groups_[g].ready_ns) {
                const std::int64_t end = now + own_ns_[summed.back()];
                if (end > groups_[g].ready_ns && !fill) break;
                gather();
                now = end;
            }
            now = std::max(now, groups_[g].ready_ns) + own_ns_[g];
            const auto group = static_cast<std::int32_t>(g);
            order.push_back({group, group, false});
            summed.insert(std::upper_bound(summed.begin(), summed.end(), g, later), g);
        }
        while (!summed.empty()) gather();
        return order;
    }

    [[nodiscard]] std::int64_t end_ns(const std::vector<Half>& order) {
        std::size_t sums = groups_.size();
        std::int64_t channel = 0, begun = 0, end = 0, early_tail = 0, all_summed = 0;
        std::int64_t before_last = 0, last_arrival = 0;
        for (const Half& half : order) {
            const auto first = static_cast<std::size_t>(half.first);
            const auto last = static_cast<std::size_t>(half.last);
            std::int64_t ready = groups_[first].ready_ns;
            if (half.gathered && round_.gathers_last) {
                ready = all_summed;
            } else if (half.gathered) {
                ready = *std::max_element(summed_ns_.begin() + half.first,
                                          summed_ns_.begin() + half.last + 1);
            }
            std::int64_t cost = first == last ? own_ns_[first] : cost_ns(first, last);
            if (round_.in_flight > 1) {
                const std::int64_t latency = std::min(latency_ns_, cost);
                begun = std::max({begun, ready, before_last});
                ready = begun + latency;
                cost -= latency;
            }
            channel = std::max(channel, ready) + cost;
            before_last = std::exchange(last_arrival, channel);
            if (!half.gathered) {
                summed_ns_[first] = channel;
                if (--sums == 0) {
                    channel += round_.norm_ns;
                    all_summed = channel;
                    end = channel + early_tail;
                }
                continue;
            }
            std::int64_t tail = 0;
            for (std::size_t g = first; g <= last; ++g) tail = std::max(tail, groups_[g].tail_ns);
            if (sums > 0) {
                early_tail = std::max(early_tail, tail);
            } else {
                end = std::max(end, channel + tail);
            }
        }
        return end;
    }

  private:
    struct Group {
        std::int64_t ready_ns;
        std::int64_t tail_ns;
        std::int64_t need;
    };

    [[nodiscard]] std::int64_t cost_ns(std::size_t first, std::size_t last) const {
        return round_.half(bytes_before_[last + 1] - bytes_before_[first]) + round_.gap_ns;
    }

    const DecoupledRound& round_;
    std::vector<Group> groups_;
    std::vector<std::int64_t> bytes_before_;
    std::vector<std::int64_t> own_ns_;  // of each group by itself
    std::vector<std::int64_t> summed_ns_;
    std::int64_t latency_ns_ = 0;
};

bool is_possible(const DecoupledRound& round, const std::vector<Half>& order) {
    std::int32_t summed = 0;  // groups, as they are summed in order
    bool gathered = false;
    for (const Half& half : order) {
        gathered |= half.gathered;
        if (!half.gathered) {
            if (gathered && round.gathers_last) return false;
            ++summed;
        } else if (half.last >= summed) {
            return false;
        }
    }
    return true;
}

void check_lasts(const DecoupledRound& round, const std::vector<std::int32_t>& lasts) {
    std::int32_t before = -1;
    for (const std::int32_t last : lasts) {
        if (last <= before) throw std::invalid_argument("the ends of groups do not increase");
        before = last;
    }
    if (before + 1 != static_cast<std::int64_t>(round.ready_ns.size())) {
        throw std::invalid_argument("the last group does not end with the last tensor");
    }
}

class Search {
  public:
    Search(const DecoupledRound& round, std::int64_t budget) : round_(round), budget_(budget) {}

    std::int64_t schedule(const std::vector<std::int32_t>& lasts) {
        Schedule groups(round_, lasts);
        DecoupledPlan best{lasts, {}, std::numeric_limits<std::int64_t>::max()};
        for (const bool fill : {false, true}) {
            std::vector<Half> order = groups.greedy(fill);
            const std::int64_t end = groups.end_ns(order);
            if (end < best.end_ns) best = {lasts, std::move(order), end};
        }
        budget_ -= 2;
        const std::int64_t end = best.end_ns;
        keep(std::move(best));
        return end;
    }

    // Adds or removes one boundary at a time, while that lets the round end earlier.
    void regroup() {
        const auto last = static_cast<std::int32_t>(round_.ready_ns.size()) - 1;
        std::vector<std::int32_t> lasts = found_.front().lasts;
        std::int64_t end = found_.front().end_ns;
        const std::int64_t left = budget_ / 2;
        for (bool moved = true; moved && budget_ > left;) {
            moved = false;
            for (std::int32_t boundary = 0; boundary < last && budget_ > left; ++boundary) {
                std::vector<std::int32_t> changed = lasts;
                const auto place = std::lower_bound(changed.begin(), changed.end(), boundary);
                if (*place == boundary) {
                    changed.erase(place);
                } else {
                    changed.insert(place, boundary);
                }
                const std::int64_t changed_end = schedule(changed);
                if (changed_end < end) {
                    lasts = std::move(changed);
                    end = changed_end;
                    moved = true;
                }
            }
        }
    }

    DecoupledPlan improved() {
        const auto plans = static_cast<std::int64_t>(found_.size());
        const std::int64_t each = std::max<std::int64_t>(budget_ / plans, 0);
        for (DecoupledPlan& plan : found_) improve(plan, each);
        return *std::min_element(found_.begin(), found_.end(), &Search::is_better);
    }

  private:
    static bool is_better(const DecoupledPlan& a, const DecoupledPlan& b) {
        return std::tuple(a.end_ns, a.order.size()) < std::tuple(b.end_ns, b.order.size());
    }

    void keep(DecoupledPlan plan) {
        const auto same = [&](const DecoupledPlan& other) { return other.lasts == plan.lasts; };
        if (std::any_of(found_.begin(), found_.end(), same)) return;
        const auto at = std::upper_bound(found_.begin(), found_.end(), plan, &Search::is_better);
        found_.insert(at, std::move(plan));
        if (found_.size() > improved_plans) found_.pop_back();
    }

    void improve(DecoupledPlan& plan, std::int64_t budget) {
        Schedule groups(round_, plan.lasts);
        const auto attempt = [&](std::vector<Half> changed) {
            if (!is_possible(round_, changed)) return false;
            --budget;
            const std::int64_t end = groups.end_ns(changed);
            if (std::tuple(end, changed.size()) >= std::tuple(plan.end_ns, plan.order.size())) {
                return false;
            }
            plan.order = std::move(changed);
            plan.end_ns = end;
            return true;
        };
        for (bool moved = true; moved && budget > 0;) {
            moved = false;
            for (std::size_t place = 0; place < plan.order.size() && budget > 0; ++place) {
                if (!plan.order[place].gathered) continue;
                moved = attempt_moves(plan.order, place, attempt) || moved;
            }
        }
    }

    // Moves an all-gather, or joins it with that of the next group.
    template <typename Attempt>
    static bool attempt_moves(const std::vector<Half>& order, std::size_t place,
                              const Attempt& attempt) {
        const Half own = order[place];
        std::vector<Half> rest = order;
        rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(place));
        const auto with = [](std::vector<Half> changed, Half half, std::size_t at) {
            changed.insert(changed.begin() + static_cast<std::ptrdiff_t>(at), half);
            return changed;
        };
        for (const std::int64_t step : steps) {
            const std::int64_t at = static_cast<std::int64_t>(place) + step;
            if (at < 0 || at > static_cast<std::int64_t>(rest.size())) continue;
            if (attempt(with(rest, own, static_cast<std::size_t>(at)))) return true;
        }
        const auto next = std::find_if(rest.begin(), rest.end(), [&](const Half& half) {
            return half.gathered && half.first == own.last + 1;
        });
        if (next == rest.end()) return false;
        const auto other = static_cast<std::size_t>(next - rest.begin());
        const Half joined{own.first, next->last, true};
        rest.erase(next);
        const std::size_t low = std::min(place, other);
        const std::size_t high = std::min(std::max(place, other), rest.size());
        return attempt(with(rest, joined, low)) ||
               (low < high && attempt(with(rest, joined, high)));
    }

    const DecoupledRound& round_;
    std::int64_t budget_;
    std::vector<DecoupledPlan> found_;  // best first; no two have the same groups
};

}  // namespace

void DecoupledRound::check() const {
    const std::size_t tensors = ready_ns.size();
    if (tensors == 0 || size_bytes.size() != tensors || tail_ns.size() != tensors ||
        need.size() != tensors) {
        throw std::invalid_argument("as many sizes, tails and needs as ready times are needed");
    }
    if (!std::is_sorted(ready_ns.begin(), ready_ns.end()) || ready_ns.front() < 0) {
        throw std::invalid_argument("ready times do not increase");
    }
    if (in_flight < 1 || in_flight > 2) {
        throw std::invalid_argument("one or two messages are in flight");
    }
}

std::int64_t decoupled_end(const DecoupledRound& round, const std::vector<std::int32_t>& lasts,
                           const std::vector<Half>& order) {
    round.check();
    check_lasts(round, lasts);
    std::int32_t summed = 0;
    std::size_t gathered = 0;
    for (const Half& half : order) {
        const bool known = 0 <= half.first && half.first <= half.last &&
                           half.last < static_cast<std::int32_t>(lasts.size());
        if (!known || (!half.gathered && (half.first != summed++ || half.last != half.first))) {
            throw std::invalid_argument("a message is none of these groups");
        }
        if (half.gathered) gathered += static_cast<std::size_t>(half.last - half.first) + 1;
    }
    if (static_cast<std::size_t>(summed) != lasts.size() || gathered != lasts.size() ||
        !is_possible(round, order)) {
        throw std::invalid_argument("each group is summed, and gathered after that");
    }
    return Schedule(round, lasts).end_ns(order);
}

DecoupledPlan plan_decoupled(const DecoupledRound& round,
                             const std::vector<std::vector<std::int32_t>>& seeds,
                             std::int64_t budget) {
    round.check();
    const std::size_t tensors = round.ready_ns.size();
    Search search(round, budget);
    for (const std::vector<std::int32_t>& seed : seeds) {
        check_lasts(round, seed);
        search.schedule(seed);
    }
    if (tensors <= exact_tensors) {
        for (std::uint32_t cuts = 0; cuts < std::uint32_t{1} << (tensors - 1); ++cuts) {
            std::vector<std::int32_t> lasts;
            for (std::size_t tensor = 0; tensor + 1 < tensors; ++tensor) {
                if ((cuts >> tensor & 1U) != 0) lasts.push_back(static_cast<std::int32_t>(tensor));
            }
            lasts.push_back(static_cast<std::int32_t>(tensors) - 1);
            search.schedule(lasts);
        }
    } else {
        if (seeds.empty()) search.schedule({static_cast<std::int32_t>(tensors) - 1});
        search.regroup();
    }
    return search.improved();
}

}  // namespace syncline
