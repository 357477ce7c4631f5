#include "simulator.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>

namespace syncline {
namespace {

// Work is counted in parts of a nanosecond so that slowed tasks keep exact integers: a task alone
// does kFullSpeed parts a nanosecond.
constexpr std::int64_t kFullSpeed = 1 << 16;
constexpr std::int64_t kLongestSumNs = std::int64_t{1} << 55;  // at 100 times slower in 63 bits
static_assert(kLongestNs < INT64_MAX / kFullSpeed);

class Engine {
  public:
    explicit Engine(const TaskGraph& graph) : graph_(graph) {
        check();
        const std::size_t count = graph.tasks.size();
        schedule_.start_ns.assign(count, -1);
        schedule_.stop_ns.assign(count, -1);
        waiting_for_.resize(count);
        remaining_.resize(count);
        version_.assign(count, 0);
        successors_at_.assign(count + 1, 0);
        lanes_.resize(graph.lanes.size());
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane) lanes_[lane].speed = kFullSpeed;
        index_successors();
        for (std::size_t task = 0; task < count; ++task) {
            waiting_for_[task] = graph.offsets[task + 1] - graph.offsets[task];
            remaining_[task] = graph.tasks[task].duration_ns * kFullSpeed;
            LaneState& lane = lanes_[lane_of(task)];
            if (in_order(task)) lane.order.push_back(task);
        }
        for (std::size_t task = 0; task < count; ++task) {
            if (waiting_for_[task] == 0) make_ready(task);
        }
    }

    Schedule run() {
        start_what_can();
        while (!events_.empty()) {
            const auto [time, task, version] = events_.top();
            events_.pop();
            if (version != version_[task]) continue;  // its lane changed speed since
            advance_to(time);
            finish(task);
            // Everything that ends at this instant ends before anything new starts.
            while (!events_.empty() && std::get<0>(events_.top()) == time) {
                const auto [same_time, other, other_version] = events_.top();
                events_.pop();
                if (other_version == version_[other]) finish(other);
            }
            start_what_can();
        }
        if (finished_ != graph_.tasks.size()) {
            throw std::runtime_error("tasks wait for each other in a cycle: " +
                                     std::to_string(graph_.tasks.size() - finished_) +
                                     " of them never start");
        }
        return std::move(schedule_);
    }

  private:
    struct LaneState {
        std::vector<std::size_t> order;  // in-order lanes: tasks as listed
        std::size_t next = 0;            // the first of them that has not started
        std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> ready;
        std::vector<std::size_t> running;
        std::int64_t speed = kFullSpeed;
    };
    using Event = std::tuple<std::int64_t, std::size_t, std::uint32_t>;  // time, task, version

    void check() const {
        const auto count = graph_.tasks.size();
        if (graph_.offsets.size() != count + 1 || graph_.offsets.front() != 0 ||
            graph_.offsets.back() != static_cast<std::int64_t>(graph_.predecessors.size())) {
            throw std::invalid_argument("the dependency table does not fit the tasks");
        }
        if (!std::ranges::is_sorted(graph_.offsets)) {
            throw std::invalid_argument("the dependency offsets decrease");
        }
        for (const Lane& lane : graph_.lanes) {
            if (lane.capacity < 1) throw std::invalid_argument("a lane needs a capacity of 1");
        }
        const auto lanes = static_cast<std::int32_t>(graph_.lanes.size());
        std::int64_t sum_ns = 0;
        for (const Task& task : graph_.tasks) {
            if (task.lane < 0 || task.lane >= lanes) throw std::invalid_argument("no such lane");
            if (task.duration_ns < 0 || task.duration_ns > kLongestNs) {
                throw std::invalid_argument("a task's duration is out of range");
            }
            sum_ns += task.duration_ns;
            if (sum_ns > kLongestSumNs) {
                throw std::invalid_argument("the tasks take more than a year in all");
            }
        }
        for (const std::int32_t before : graph_.predecessors) {
            if (before < 0 || static_cast<std::size_t>(before) >= count) {
                throw std::invalid_argument("a task waits for one that does not exist");
            }
        }
        for (const Contention& pair : graph_.contentions) {
            const bool known = pair.lane_a >= 0 && pair.lane_a < lanes && pair.lane_b >= 0 &&
                               pair.lane_b < lanes && pair.lane_a != pair.lane_b;
            if (!known || !(pair.slowdown >= 1.0 && pair.slowdown <= 100.0)) {
                throw std::invalid_argument("a contention needs two lanes and a slowdown >= 1");
            }
        }
    }

    [[nodiscard]] std::size_t lane_of(std::size_t task) const {
        return static_cast<std::size_t>(graph_.tasks[task].lane);
    }
    [[nodiscard]] bool in_order(std::size_t task) const {
        return graph_.lanes[lane_of(task)].in_order;
    }

    void index_successors() {
        const std::size_t count = graph_.tasks.size();
        for (const std::int32_t before : graph_.predecessors) {
            ++successors_at_[static_cast<std::size_t>(before) + 1];
        }
        for (std::size_t task = 0; task < count; ++task) {
            successors_at_[task + 1] += successors_at_[task];
        }
        successors_.resize(graph_.predecessors.size());
        std::vector<std::size_t> cursor(successors_at_.begin(), successors_at_.end() - 1);
        for (std::size_t task = 0; task < count; ++task) {
            for (auto k = graph_.offsets[task]; k < graph_.offsets[task + 1]; ++k) {
                const auto before =
                    static_cast<std::size_t>(graph_.predecessors[static_cast<std::size_t>(k)]);
                successors_[cursor[before]++] = task;
            }
        }
    }

    void make_ready(std::size_t task) {
        if (!in_order(task)) lanes_[lane_of(task)].ready.push(task);
        touched_.push_back(lane_of(task));
    }

    // Starts every task that may start now, then sets the speeds that follow from who is busy.
    void start_what_can() {
        while (!touched_.empty()) {
            const std::size_t lane = touched_.back();
            touched_.pop_back();
            LaneState& state = lanes_[lane];
            const auto capacity = static_cast<std::size_t>(graph_.lanes[lane].capacity);
            while (state.running.size() < capacity) {
                std::size_t task = 0;
                if (graph_.lanes[lane].in_order) {
                    if (state.next == state.order.size()) break;
                    task = state.order[state.next];
                    if (waiting_for_[task] != 0) break;
                    ++state.next;
                } else {
                    if (state.ready.empty()) break;
                    task = state.ready.top();
                    state.ready.pop();
                }
                schedule_.start_ns[task] = now_;
                state.running.push_back(task);
                started_.push_back(task);
            }
        }
        set_speeds();
        for (const std::size_t task : started_) push_event(task);
        started_.clear();
    }

    void set_speeds() {
        if (graph_.contentions.empty()) return;
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
            double slowdown = 1.0;
            for (const Contention& pair : graph_.contentions) {
                const auto a = static_cast<std::size_t>(pair.lane_a);
                const auto b = static_cast<std::size_t>(pair.lane_b);
                if (lane != a && lane != b) continue;
                if (!lanes_[lane == a ? b : a].running.empty()) {
                    slowdown = std::max(slowdown, pair.slowdown);
                }
            }
            const auto speed =
                std::max<std::int64_t>(1, std::llround(static_cast<double>(kFullSpeed) / slowdown));
            LaneState& state = lanes_[lane];
            if (speed == state.speed) continue;
            state.speed = speed;
            for (const std::size_t task : state.running) {
                ++version_[task];
                push_event(task);
            }
        }
    }

    void push_event(std::size_t task) {
        const std::int64_t speed = lanes_[lane_of(task)].speed;
        const std::int64_t left_ns = (remaining_[task] + speed - 1) / speed;
        events_.emplace(now_ + left_ns, task, version_[task]);
    }

    // Only lanes in a contention ever change speed, so only their tasks need their progress kept.
    void advance_to(std::int64_t time) {
        const std::int64_t passed_ns = time - now_;
        now_ = time;
        if (graph_.contentions.empty() || passed_ns == 0) return;
        for (LaneState& state : lanes_) {
            for (const std::size_t task : state.running) {
                remaining_[task] =
                    std::max<std::int64_t>(0, remaining_[task] - passed_ns * state.speed);
            }
        }
    }

    void finish(std::size_t task) {
        schedule_.stop_ns[task] = now_;
        ++version_[task];
        ++finished_;
        const std::size_t lane = lane_of(task);
        std::erase(lanes_[lane].running, task);
        touched_.push_back(lane);
        for (std::size_t k = successors_at_[task]; k < successors_at_[task + 1]; ++k) {
            const std::size_t next = successors_[k];
            if (--waiting_for_[next] == 0) make_ready(next);
        }
    }

    const TaskGraph& graph_;
    Schedule schedule_;
    std::int64_t now_ = 0;
    std::size_t finished_ = 0;
    std::vector<std::int64_t> waiting_for_;
    std::vector<std::int64_t> remaining_;  // parts of work left
    std::vector<std::uint32_t> version_;   // events of an older version are void
    std::vector<std::size_t> successors_at_;
    std::vector<std::size_t> successors_;
    std::vector<LaneState> lanes_;
    std::vector<std::size_t> touched_;  // lanes where something may be able to start
    std::vector<std::size_t> started_;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace

Schedule simulate(const TaskGraph& graph) { return Engine(graph).run(); }

}  // namespace syncline
