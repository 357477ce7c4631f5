#include "dispatch.hpp"

#include <algorithm>
#include <queue>
#include <set>
#include <utility>
#include <vector>

namespace syncline {

namespace {

constexpr int look_ahead = 64;   // more urgent tensors considered before one message
constexpr int look_around = 24;  // waiting tensors considered before one merge

class Dispatcher {
  public:
    Dispatcher(const Gradients& gradients, const DispatchRule& rule)
        : gradients_(gradients), rule_(rule), latency_ns_(gradients.latency_ns()) {
        const std::int32_t n = gradients.count();
        left_.reserve(static_cast<std::size_t>(n));
        for (std::int32_t i = 0; i < n; ++i) left_.push_back({{i, 0}, {i + 1, 0}, 0});
        for (std::int32_t i = 0; i < n; ++i) weigh(i);
    }

    Messages run() {
        std::int64_t now = 0;
        while (true) {
            now = std::max(now, decision_ns());
            admit(now);
            if (waiting_.empty()) {
                if (coming_ == gradients_.count()) return std::move(sent_);
                now = gradients_.ready_ns(coming_);
                continue;
            }
            const std::int64_t until = send_next();
            if (until > 0) now = until;  // held back for a more urgent tensor
        }
    }

  private:
    struct Left {
        Cut begin;
        Cut end;
        std::int64_t work_ns;
        [[nodiscard]] bool empty() const { return begin == end; }
    };
    using Waiting = std::set<std::pair<std::int64_t, std::int32_t>>;  // -tail, tensor

    Left& left(std::int32_t i) { return left_[static_cast<std::size_t>(i)]; }
    std::int64_t due(std::int32_t i) const { return rule_.target_ns - gradients_.tail_ns(i); }

    void weigh(std::int32_t i) {
        Left& rest = left(i);
        const std::int64_t bytes = gradients_.bytes(rest.end) - gradients_.bytes(rest.begin);
        rest.work_ns = gradients_.transmission_ns(bytes) + (gradients_.overlap() ? 0 : latency_ns_);
    }

    // How late a message may be chosen without loss.
    std::int64_t decision_ns() const {
        if (!gradients_.overlap()) return channel_.latency_free_ns;
        return std::max(channel_.latency_free_ns, channel_.transmission_free_ns - latency_ns_);
    }

    void admit(std::int64_t now) {
        while (coming_ < gradients_.count() && gradients_.ready_ns(coming_) <= now) {
            waiting_.emplace(-gradients_.tail_ns(coming_), coming_);
            ++coming_;
        }
    }

    // When the transmission of a message that is ready at `ready_ns` begins.
    std::int64_t transmission_start(std::int64_t ready_ns) const {
        return std::max(std::max(ready_ns, channel_.latency_free_ns) + latency_ns_,
                        channel_.transmission_free_ns);
    }

    struct Limit {
        std::int64_t end_ns;  // a message must have arrived by then
        std::int32_t tensor;  // for the sake of this tensor; -1: none
    };

    // How late a message over tensors of at most tail `tail_ns` may arrive without making a more
    // urgent tensor late that becomes ready before `arrival_ns`, when it would arrive.
    Limit limit(std::int64_t tail_ns, std::int64_t arrival_ns) {
        Limit found{std::int64_t{1} << 61, -1};
        urgent_.clear();
        const std::int64_t lead_ns = gradients_.overlap() ? latency_ns_ : 0;
        int looked = 0;
        for (std::int32_t v = coming_; v < gradients_.count() && looked < look_ahead; ++v) {
            const std::int64_t ready = gradients_.ready_ns(v);
            if (ready + lead_ns >= arrival_ns) break;
            const std::int64_t tail = gradients_.tail_ns(v);
            if (tail <= tail_ns) continue;
            ++looked;
            // All that is at least as urgent as v must be sent by the time that v is due.
            const auto place = std::ranges::upper_bound(urgent_, std::pair(-tail, v));
            urgent_.insert(place, {-tail, v});
            std::int64_t work = 0;
            for (const auto& [less, w] : urgent_) {
                work += left(w).work_ns;
                if (less < -tail) continue;  // those more urgent than v are unchanged
                const std::int64_t latest =
                    std::max(due(w) - work, gradients_.ready_ns(w) + lead_ns);
                if (latest < found.end_ns) found = {latest, w};
            }
        }
        return found;
    }

    // Whether everything waiting that is more urgent than `tail_ns` and outside [first, last] can
    // still be sent in time after `arrival_ns`.
    bool leaves_time(std::int64_t tail_ns, std::int32_t first, std::int32_t last,
                     std::int64_t arrival_ns) {
        std::int64_t end = arrival_ns;
        int looked = 0;
        for (const auto& [less, w] : waiting_) {
            if (-less <= tail_ns || ++looked > look_around) break;
            if (first <= w && w <= last) continue;
            end += left(w).work_ns;
            if (end > due(w)) return false;
        }
        return true;
    }

    // Sends one message, or returns until when to wait instead.
    std::int64_t send_next() {
        const std::int32_t first_choice = waiting_.begin()->second;
        std::int32_t first = first_choice;
        Cut begin = left(first).begin;
        Cut end = left(first).end;
        std::int64_t start = transmission_start(gradients_.ready_ns(first));
        const auto arrival = [&](Cut from, Cut to) {
            return start +
                   gradients_.transmission_ns(gradients_.bytes(to) - gradients_.bytes(from));
        };
        Limit most = limit(gradients_.tail_ns(first), arrival(begin, end));
        if (arrival(begin, end) > most.end_ns) {
            const std::int64_t room = most.end_ns - start;
            Cut reached = begin;
            if (room > 0 && room >= rule_.worthwhile_ns) {
                reached = gradients_.furthest(begin, end, room);
            }
            if (reached > begin) {
                emit(begin, reached);
                return 0;
            }
            // Something else may fit in before the urgent tensor is ready.
            int looked = 0;
            for (const auto& [less, w] : waiting_) {
                if (++looked > look_around) break;
                if (w == first) continue;
                start = transmission_start(gradients_.ready_ns(w));
                if (arrival(left(w).begin, left(w).end) <= most.end_ns) {
                    emit(left(w).begin, left(w).end);
                    return 0;
                }
            }
            return std::max(gradients_.ready_ns(most.tensor), decision_ns());
        }

        std::int32_t last = first;
        std::int64_t deadline = due(first);
        std::int64_t tail = gradients_.tail_ns(first);
        const std::int64_t latency_free = channel_.latency_free_ns;
        while (arrival(begin, end) - start < rule_.enough_ns) {
            // The more urgent of the neighbours that adjoin, are ready and wait.
            std::int32_t chosen = -1;
            const std::int32_t below = begin.element == 0 ? begin.tensor - 1 : -1;
            const std::int32_t above = end.element == 0 ? end.tensor : -1;
            if (below >= 0 && !left(below).empty() && left(below).end == begin) chosen = below;
            if (above >= 0 && above < coming_ && !left(above).empty() && left(above).begin == end &&
                (chosen < 0 || gradients_.tail_ns(above) > gradients_.tail_ns(chosen))) {
                chosen = above;
            }
            if (chosen < 0) break;
            const Cut from = chosen == below ? left(chosen).begin : begin;
            const Cut to = chosen == below ? end : left(chosen).end;
            const std::int64_t ready =
                std::max(gradients_.ready_ns(std::max(last, chosen)), latency_free);
            const std::int64_t later_start =
                std::max(ready + latency_ns_, channel_.transmission_free_ns);
            const std::int64_t before = start;
            start = std::max(start, later_start);
            const std::int64_t due_ns = std::min(deadline, due(chosen));
            const std::int64_t arrived = arrival(from, to);
            const std::int64_t lowest = std::min(tail, gradients_.tail_ns(chosen));
            const std::int64_t bound = limit(lowest, arrived).end_ns;
            const bool in_time = arrived <= due_ns && arrived <= bound &&
                                 leaves_time(gradients_.tail_ns(chosen), std::min(first, chosen),
                                             std::max(last, chosen), arrived);
            if (!in_time) {
                if (rule_.fill && start == before) {
                    const std::int64_t room = std::min(due_ns, bound) - start;
                    const std::int64_t has = arrival(begin, end) - start;
                    if (room > has &&
                        leaves_time(gradients_.tail_ns(chosen), std::min(first, chosen),
                                    std::max(last, chosen), start + room)) {
                        const std::int64_t more = room - has;
                        if (chosen == below) {
                            begin = gradients_.nearest(left(chosen).begin, begin, more);
                        } else {
                            end = gradients_.furthest(end, left(chosen).end, more);
                        }
                    }
                }
                start = before;
                break;
            }
            begin = from;
            end = to;
            first = std::min(first, chosen);
            last = std::max(last, chosen);
            deadline = due_ns;
            tail = lowest;
        }
        emit(begin, end);
        return 0;
    }

    void emit(Cut begin, Cut end) {
        sent_.push_back(gradients_.message(begin, end));
        channel_.send(sent_.back(), latency_ns_, gradients_.overlap());
        const std::int32_t last = end.element > 0 ? end.tensor : end.tensor - 1;
        for (std::int32_t i = begin.tensor; i <= last; ++i) {
            Left& rest = left(i);
            const Cut from = std::max(begin, rest.begin);
            const Cut to = std::min(end, rest.end);
            if (from == rest.begin) {
                rest.begin = to;
            } else {
                rest.end = from;
            }
            if (rest.empty()) {
                waiting_.erase({-gradients_.tail_ns(i), i});
            } else {
                weigh(i);
            }
        }
    }

    const Gradients& gradients_;
    const DispatchRule rule_;
    const std::int64_t latency_ns_;
    std::vector<Left> left_;
    Waiting waiting_;
    std::int32_t coming_ = 0;  // the first tensor that is not ready
    Channel channel_;
    Messages sent_;
    std::vector<std::pair<std::int64_t, std::int32_t>> urgent_;  // -tail, tensor
};

}  // namespace

Messages dispatch(const Gradients& gradients, const DispatchRule& rule) {
    return Dispatcher(gradients, rule).run();
}

Messages longest_tail_first(const Gradients& gradients, const Messages& messages) {
    using Urgency = std::pair<std::int64_t, std::int64_t>;  // tail, -index
    std::priority_queue<Urgency> waiting;
    Messages order;
    order.reserve(messages.size());
    Channel channel;
    std::size_t coming = 0;
    const std::int64_t latency_ns = gradients.latency_ns();
    while (order.size() < messages.size()) {
        std::int64_t now = channel.latency_free_ns;
        if (gradients.overlap()) now = std::max(now, channel.transmission_free_ns - latency_ns);
        if (waiting.empty()) now = std::max(now, messages[coming].ready_ns);
        while (coming < messages.size() && messages[coming].ready_ns <= now) {
            waiting.emplace(messages[coming].tail_ns, -static_cast<std::int64_t>(coming));
            ++coming;
        }
        order.push_back(messages[static_cast<std::size_t>(-waiting.top().second)]);
        waiting.pop();
        channel.send(order.back(), latency_ns, gradients.overlap());
    }
    return order;
}

}  // namespace syncline
