#include "simulator.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace syncline {
namespace {

// Work is counted in parts of a nanosecond so that slowed tasks keep exact integers: a task alone
// does full_speed parts a nanosecond.
constexpr std::int64_t full_speed = 1 << 16;
constexpr std::int64_t longest_sum_ns = std::int64_t{1} << 55;  // fits 63 bits if 100 times slower
static_assert(longest_ns < INT64_MAX / full_speed);

using Index = std::uint32_t;  // of a task or a lane

template <typename T>
using MinHeap = std::priority_queue<T, std::vector<T>, std::greater<>>;

// The entries of row i of a table in compressed form.
template <typename T>
std::span<const T> row(const std::vector<std::int64_t>& offsets, const std::vector<T>& entries,
                       std::size_t i) {
    const auto begin = static_cast<std::size_t>(offsets[i]);
    return {entries.data() + begin, static_cast<std::size_t>(offsets[i + 1]) - begin};
}

void check_table(const std::vector<std::int64_t>& offsets, std::size_t entries, std::size_t count,
                 const std::string& what) {
    if (offsets.size() != count + 1 || offsets.front() != 0 ||
        offsets.back() != static_cast<std::int64_t>(entries)) {
        throw std::invalid_argument("the " + what + " table does not fit the tasks");
    }
    if (!std::ranges::is_sorted(offsets)) {
        throw std::invalid_argument("the " + what + " offsets decrease");
    }
}

void check(const TaskGraph& graph) {
    const std::size_t count = graph.tasks.size();
    if (count >= std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument("more tasks than 32 bits number");
    }
    check_table(graph.offsets, graph.predecessors.size(), count, "dependency");
    for (const Lane& lane : graph.lanes) {
        if (lane.capacity < 0) throw std::invalid_argument("a lane's capacity is negative");
    }
    const auto lanes = static_cast<std::int32_t>(graph.lanes.size());
    std::int64_t sum_ns = 0;
    for (const Task& task : graph.tasks) {
        if (task.lane < 0 || task.lane >= lanes) throw std::invalid_argument("no such lane");
        if (task.duration_ns < 0 || task.duration_ns > longest_ns) {
            throw std::invalid_argument("a task's duration is out of range");
        }
        sum_ns += task.duration_ns;
        if (sum_ns > longest_sum_ns) {
            throw std::invalid_argument("the tasks take more than a year in all");
        }
    }
    for (const std::int32_t before : graph.predecessors) {
        if (before < 0 || static_cast<std::size_t>(before) >= count) {
            throw std::invalid_argument("a task waits for one that does not exist");
        }
    }
    std::vector<bool> contends(graph.lanes.size(), false);
    const auto possible = [](double slowdown) { return slowdown >= 1.0 && slowdown <= 100.0; };
    for (const Contention& pair : graph.contentions) {
        const bool known = pair.lane_a >= 0 && pair.lane_a < lanes && pair.lane_b >= 0 &&
                           pair.lane_b < lanes && pair.lane_a != pair.lane_b;
        if (!known || !possible(pair.slowdown_a) || !possible(pair.slowdown_b)) {
            throw std::invalid_argument("a contention needs two lanes and slowdowns >= 1");
        }
        contends[static_cast<std::size_t>(pair.lane_a)] = true;
        contends[static_cast<std::size_t>(pair.lane_b)] = true;
    }
    std::vector<bool> uses(count, false);
    for (const Use& use : graph.uses) {
        if (use.task < 0 || static_cast<std::size_t>(use.task) >= count || use.stage < 0 ||
            static_cast<std::size_t>(use.stage) >= graph.stages.size()) {
            throw std::invalid_argument("a stage or its user does not exist");
        }
        const double capacity = graph.stages[static_cast<std::size_t>(use.stage)];
        if (!(use.share > 0.0 && use.share <= capacity && std::isfinite(capacity))) {
            throw std::invalid_argument("a task's share of a stage is not above 0, or too large");
        }
        if (uses[static_cast<std::size_t>(use.task)]) {
            throw std::invalid_argument("a task uses two stages");
        }
        uses[static_cast<std::size_t>(use.task)] = true;
    }
    if (graph.extra_offsets.empty() && graph.extra_lanes.empty()) return;
    check_table(graph.extra_offsets, graph.extra_lanes.size(), count, "extra lane");
    for (std::size_t task = 0; task < count; ++task) {
        const std::span<const std::int32_t> extra =
            row(graph.extra_offsets, graph.extra_lanes, task);
        if (extra.empty()) continue;
        std::vector<std::int32_t> held(extra.begin(), extra.end());
        held.push_back(graph.tasks[task].lane);
        std::ranges::sort(held);
        if (held.front() < 0 || held.back() >= lanes ||
            std::ranges::adjacent_find(held) != held.end()) {
            throw std::invalid_argument("a task holds a lane that does not exist, or one twice");
        }
        for (const std::int32_t lane : held) {
            const Lane& kind = graph.lanes[static_cast<std::size_t>(lane)];
            if (kind.in_order || kind.capacity == 0 || contends[static_cast<std::size_t>(lane)]) {
                throw std::invalid_argument(
                    "a task that holds several lanes needs them limited, not in order and without "
                    "contention");
            }
        }
    }
}

// Whether one pass over the tasks in their order finds every start.
bool is_sweepable(const TaskGraph& graph) {
    const auto plain = [](const Lane& lane) {
        return lane.capacity == 0 || (lane.capacity == 1 && lane.in_order);
    };
    const bool varies = !graph.contentions.empty() || !graph.uses.empty();
    if (varies || !std::ranges::all_of(graph.lanes, plain)) return false;
    for (std::size_t task = 0; task < graph.tasks.size(); ++task) {
        for (const std::int32_t before : row(graph.offsets, graph.predecessors, task)) {
            if (static_cast<std::size_t>(before) >= task) return false;
        }
    }
    return true;
}

// The longest path: a task starts when all that it waits for has ended, and the task before it on
// its lane has ended or, on a lane that runs any number in order, started.
Schedule sweep(const TaskGraph& graph) {
    Schedule schedule;
    const std::size_t count = graph.tasks.size();
    schedule.start_ns.resize(count);
    schedule.stop_ns.resize(count);
    std::vector<std::int64_t> free_at(graph.lanes.size(), 0);
    for (std::size_t i = 0; i < count; ++i) {
        const auto lane = static_cast<std::size_t>(graph.tasks[i].lane);
        std::int64_t start = free_at[lane];
        for (const std::int32_t before : row(graph.offsets, graph.predecessors, i)) {
            start = std::max(start, schedule.stop_ns[static_cast<std::size_t>(before)]);
        }
        schedule.start_ns[i] = start;
        schedule.stop_ns[i] = start + graph.tasks[i].duration_ns;
        if (graph.lanes[lane].in_order) {
            free_at[lane] = graph.lanes[lane].capacity ? schedule.stop_ns[i] : start;
        }
    }
    return schedule;
}

class Engine {
  public:
    explicit Engine(const TaskGraph& graph)
        : graph_(graph),
          varies_(!graph.contentions.empty() || !graph.uses.empty()),
          shares_(!graph.extra_lanes.empty()) {
        const std::size_t count = graph.tasks.size();
        schedule_.start_ns.assign(count, -1);
        schedule_.stop_ns.assign(count, -1);
        waiting_for_.resize(count);
        if (varies_) {
            remaining_.resize(count);
            since_ns_.resize(count);
            version_.assign(count, 0);
            speed_.assign(count, full_speed);
            stage_of_.assign(count, no_stage);
            share_.resize(count);
        }
        stages_.resize(graph.stages.size());
        for (const Use& use : graph.uses) {
            stage_of_[static_cast<std::size_t>(use.task)] = static_cast<Index>(use.stage);
            share_[static_cast<std::size_t>(use.task)] = use.share;
        }
        lanes_.resize(graph.lanes.size());
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
            const std::int32_t capacity = graph.lanes[lane].capacity;
            lanes_[lane].free = capacity ? static_cast<Index>(capacity) : UINT32_MAX;
        }
        for (const Contention& pair : graph.contentions) {
            const auto a = static_cast<Index>(pair.lane_a);
            const auto b = static_cast<Index>(pair.lane_b);
            lanes_[a].contenders.emplace_back(b, pair.slowdown_b);
            lanes_[b].contenders.emplace_back(a, pair.slowdown_a);
        }
        index_successors();
        index_orders();
        for (std::size_t task = 0; task < count; ++task) {
            waiting_for_[task] =
                static_cast<std::int32_t>(graph.offsets[task + 1] - graph.offsets[task]);
            if (varies_) remaining_[task] = graph.tasks[task].duration_ns * full_speed;
            if (waiting_for_[task] == 0) make_ready(static_cast<Index>(task));
        }
    }

    Schedule run() {
        start_what_can();
        while (!events_.empty()) {
            const std::int64_t time = events_.top().time_ns;
            now_ = time;
            // Everything that ends at this instant ends before anything new starts.
            while (!events_.empty() && events_.top().time_ns == time) {
                const Event event = events_.top();
                events_.pop();
                // An event of an older version is void: its lane has changed speed since.
                if (!varies_ || event.version == version_[event.task]) finish(event.task);
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
        Index free = 0;  // how many more tasks it may run now
        Index next = 0;  // in-order lanes: place in order_ of the first that has not started
        MinHeap<Index> ready = {};
        std::vector<std::pair<Index, double>> contenders = {};  // lanes that it slows, and how much
        // Of a lane with contenders only:
        std::vector<Index> running = {};
        std::multiset<double> slowdowns = {};  // of the contenders that are busy
        bool was_busy = false;                 // when the speeds were last set
        std::int64_t speed = full_speed;
    };
    static constexpr Index no_stage = UINT32_MAX;
    struct StageState {
        std::vector<Index> running = {};
        bool changed = false;  // which tasks run, or how fast they could
    };
    struct Event {
        std::int64_t time_ns;
        Index task;
        Index version;
        bool operator>(const Event& other) const {
            return std::tie(time_ns, task) > std::tie(other.time_ns, other.task);
        }
    };

    [[nodiscard]] Index lane_of(Index task) const {
        return static_cast<Index>(graph_.tasks[task].lane);
    }
    [[nodiscard]] std::span<const std::int32_t> extra_lanes_of(Index task) const {
        if (!shares_) return {};
        return row(graph_.extra_offsets, graph_.extra_lanes, task);
    }

    void index_successors() {
        const std::size_t count = graph_.tasks.size();
        successors_at_.assign(count + 1, 0);
        for (const std::int32_t before : graph_.predecessors) {
            ++successors_at_[static_cast<std::size_t>(before) + 1];
        }
        for (std::size_t task = 0; task < count; ++task) {
            successors_at_[task + 1] += successors_at_[task];
        }
        successors_.resize(graph_.predecessors.size());
        std::vector<std::int64_t> cursor(successors_at_.begin(), successors_at_.end() - 1);
        for (std::size_t task = 0; task < count; ++task) {
            for (const std::int32_t before : row(graph_.offsets, graph_.predecessors, task)) {
                const std::int64_t place = cursor[static_cast<std::size_t>(before)]++;
                successors_[static_cast<std::size_t>(place)] = static_cast<Index>(task);
            }
        }
    }

    // Lists the tasks of each in-order lane in their order, lane after lane.
    void index_orders() {
        order_stop_.assign(lanes_.size(), 0);
        for (const Task& task : graph_.tasks) ++order_stop_[static_cast<std::size_t>(task.lane)];
        Index place = 0;
        for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
            const Index tasks = graph_.lanes[lane].in_order ? order_stop_[lane] : 0;
            lanes_[lane].next = place;
            order_stop_[lane] = place;
            place += tasks;
        }
        order_.resize(place);
        for (Index task = 0; task < graph_.tasks.size(); ++task) {
            const Index lane = lane_of(task);
            if (graph_.lanes[lane].in_order) order_[order_stop_[lane]++] = task;
        }
    }

    void make_ready(Index task) {
        const Index lane = lane_of(task);
        if (!graph_.lanes[lane].in_order) lanes_[lane].ready.push(task);
        touched_.push_back(lane);
    }

    // Starts every task that may start now, then sets the speeds that follow from who is busy.
    void start_what_can() {
        for (const Index lane : touched_) {
            LaneState& state = lanes_[lane];
            if (graph_.lanes[lane].in_order) {
                while (state.free && state.next < order_stop_[lane] &&
                       waiting_for_[order_[state.next]] == 0) {
                    start(order_[state.next++]);
                }
            } else if (shares_) {
                if (state.free && !state.ready.empty()) heads_.emplace(state.ready.top(), lane);
            } else {
                while (state.free && !state.ready.empty()) {
                    const Index task = state.ready.top();
                    state.ready.pop();
                    start(task);
                }
            }
        }
        if (shares_) start_sharing();
        if (varies_) set_speeds();
        touched_.clear();
        for (const Index task : started_) push_event(task);
        started_.clear();
    }

    // Starts every ready task whose lanes are all free, the lowest index first. Any other waits at
    // one of its busy lanes, so that only tasks at freed lanes are looked at again.
    void start_sharing() {
        while (!heads_.empty()) {
            const auto [task, lane] = heads_.top();
            heads_.pop();
            LaneState& state = lanes_[lane];
            if (!state.free || state.ready.empty() || state.ready.top() != task) continue;
            state.ready.pop();
            if (const Index* busy = busy_lane(task)) {
                lanes_[*busy].ready.push(task);
            } else {
                start(task);
            }
            if (state.free && !state.ready.empty()) heads_.emplace(state.ready.top(), lane);
        }
    }

    // Returns a lane that the task needs and that has no room, or nothing.
    const Index* busy_lane(Index task) {
        busy_ = lane_of(task);
        if (!lanes_[busy_].free) return &busy_;
        for (const std::int32_t lane : extra_lanes_of(task)) {
            busy_ = static_cast<Index>(lane);
            if (!lanes_[busy_].free) return &busy_;
        }
        return nullptr;
    }

    void start(Index task) {
        schedule_.start_ns[task] = now_;
        LaneState& state = lanes_[lane_of(task)];
        take(state);
        for (const std::int32_t lane : extra_lanes_of(task)) {
            take(lanes_[static_cast<std::size_t>(lane)]);
        }
        if (varies_) {
            since_ns_[task] = now_;
            speed_[task] = state.speed;
            if (!state.contenders.empty()) state.running.push_back(task);
            if (const Index stage = stage_of_[task]; stage != no_stage) {
                stages_[stage].running.push_back(task);
                touch_stage(stage);
            }
        }
        started_.push_back(task);
    }

    static void take(LaneState& state) {
        if (state.free != UINT32_MAX) --state.free;
    }

    void give_back(Index lane) {
        if (graph_.lanes[lane].capacity) ++lanes_[lane].free;
        touched_.push_back(lane);
    }

    void set_speeds() {
        for (const Index lane : touched_) {
            LaneState& state = lanes_[lane];
            const bool busy = !state.running.empty();
            if (busy == state.was_busy) continue;
            state.was_busy = busy;
            for (const auto& [contender, slowdown] : state.contenders) {
                std::multiset<double>& slowdowns = lanes_[contender].slowdowns;
                if (busy) {
                    slowdowns.insert(slowdown);
                } else {
                    slowdowns.erase(slowdowns.find(slowdown));
                }
                changed_.push_back(contender);
            }
        }
        for (const Index lane : changed_) {
            LaneState& state = lanes_[lane];
            const double slowdown = state.slowdowns.empty() ? 1.0 : *state.slowdowns.rbegin();
            const auto speed =
                std::max<std::int64_t>(1, std::llround(static_cast<double>(full_speed) / slowdown));
            if (speed == state.speed) continue;
            state.speed = speed;
            for (const Index task : state.running) {
                if (const Index stage = stage_of_[task]; stage != no_stage) {
                    touch_stage(stage);
                } else {
                    set_speed(task, speed);
                }
            }
        }
        changed_.clear();
        for (const Index stage : changed_stages_) share_out(stage);
        changed_stages_.clear();
        started_.insert(started_.end(), restarted_.begin(), restarted_.end());
        restarted_.clear();
    }

    void touch_stage(Index stage) {
        if (stages_[stage].changed) return;
        stages_[stage].changed = true;
        changed_stages_.push_back(stage);
    }

    // The task that wants least is served first: it gets that, or an equal part of what is left.
    void share_out(Index stage) {
        StageState& state = stages_[stage];
        state.changed = false;
        wanted_.clear();
        for (const Index task : state.running) {
            const std::int64_t speed = lanes_[lane_of(task)].speed;
            wanted_.emplace_back(share_[task] * static_cast<double>(speed), task);
        }
        std::ranges::sort(wanted_);
        double left = graph_.stages[stage] * static_cast<double>(full_speed);
        std::size_t users = wanted_.size();
        for (const auto& [wanted, task] : wanted_) {
            const double part = left / static_cast<double>(users--);
            std::int64_t speed = lanes_[lane_of(task)].speed;
            if (wanted > part) {
                speed = std::clamp<std::int64_t>(std::llround(part / share_[task]), 1, speed);
            }
            left -= std::min(wanted, part);
            set_speed(task, speed);
        }
    }

    // A task that has just started has no event yet; for any other, its work so far is subtracted.
    void set_speed(Index task, std::int64_t speed) {
        if (speed == speed_[task]) return;
        if (version_[task] != 0) {
            const std::int64_t done = (now_ - since_ns_[task]) * speed_[task];
            remaining_[task] = std::max<std::int64_t>(0, remaining_[task] - done);
            since_ns_[task] = now_;
            restarted_.push_back(task);
        }
        speed_[task] = speed;
    }

    void push_event(Index task) {
        if (!varies_) {
            events_.push({now_ + graph_.tasks[task].duration_ns, task, 0});
            return;
        }
        const std::int64_t speed = speed_[task];
        const std::int64_t left_ns = (remaining_[task] + speed - 1) / speed;
        events_.push({now_ + left_ns, task, ++version_[task]});
    }

    void finish(Index task) {
        schedule_.stop_ns[task] = now_;
        ++finished_;
        const Index lane = lane_of(task);
        give_back(lane);
        for (const std::int32_t other : extra_lanes_of(task)) give_back(static_cast<Index>(other));
        if (varies_) {
            ++version_[task];
            if (!lanes_[lane].contenders.empty()) std::erase(lanes_[lane].running, task);
            if (const Index stage = stage_of_[task]; stage != no_stage) {
                std::erase(stages_[stage].running, task);
                touch_stage(stage);
            }
        }
        const auto begin = static_cast<std::size_t>(successors_at_[task]);
        const auto end = static_cast<std::size_t>(successors_at_[task + 1]);
        for (std::size_t k = begin; k < end; ++k) {
            if (--waiting_for_[successors_[k]] == 0) make_ready(successors_[k]);
        }
    }

    const TaskGraph& graph_;
    const bool varies_;  // tasks may change their speed
    const bool shares_;  // tasks hold several lanes
    Schedule schedule_;
    std::int64_t now_ = 0;
    std::size_t finished_ = 0;
    std::vector<std::int32_t> waiting_for_;
    std::vector<std::int64_t> remaining_;  // parts of work left at since_ns_
    std::vector<std::int64_t> since_ns_;
    std::vector<Index> version_;  // of the task's event that counts; 0: none yet
    std::vector<std::int64_t> speed_;
    std::vector<Index> stage_of_;
    std::vector<double> share_;  // that a task at full speed takes of its stage
    std::vector<StageState> stages_;
    std::vector<Index> changed_stages_;
    std::vector<std::pair<double, Index>> wanted_;
    std::vector<std::int64_t> successors_at_;
    std::vector<Index> successors_;
    std::vector<Index> order_;
    std::vector<Index> order_stop_;  // by lane
    std::vector<LaneState> lanes_;
    std::vector<Index> touched_;  // lanes where something may be able to start
    std::vector<Index> changed_;  // lanes whose speed may have changed
    std::vector<Index> started_;
    std::vector<Index> restarted_;
    Index busy_ = 0;
    MinHeap<std::pair<Index, Index>> heads_;  // the first ready task of a lane, and the lane
    MinHeap<Event> events_;
};

}  // namespace

Schedule simulate(const TaskGraph& graph) {
    check(graph);
    return is_sweepable(graph) ? sweep(graph) : Engine(graph).run();
}

}  // namespace syncline
