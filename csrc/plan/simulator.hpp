// A deterministic discrete-event simulator of tasks on lanes, on an integer-nanosecond clock.
#pragma once

#include <cstdint>
#include <vector>

#include "cost_curve.hpp"  // longest_ns

namespace syncline {

// A resource that runs tasks: a compute stream, a communication channel, a disk, a network port.
struct Lane {
    // How many tasks it runs at once (the credits of a channel); 0 for any number.
    std::int32_t capacity = 1;
    // true: tasks start in the order in which they are listed, so that a late one holds up those
    // behind it (a static plan). false: whichever task is ready starts, the lowest index first.
    bool in_order = true;
};

// While both lanes are busy, each runs slower by its own factor. A lane in several pairs is slowed
// by the largest.
struct Contention {
    std::int32_t lane_a;
    std::int32_t lane_b;
    double slowdown_a;  // of lane_a, at least 1
    double slowdown_b;
};

struct Task {
    std::int32_t lane;
    std::int64_t duration_ns;  // at most longest_ns
};

// A task that takes a share of a stage's capacity while it runs at full speed, such as a message
// that transmits half of the time on a link. If running tasks want more than the capacity, it is
// shared max-min fairly: each gets what it wants or, running slower, as much as any other.
struct Use {
    std::int32_t task;
    std::int32_t stage;
    double share;  // above 0, at most the capacity
};

// The task graph: task i starts after every task in predecessors[offsets[i] .. offsets[i + 1]).
//
// A task may hold further lanes, extra_lanes[extra_offsets[i] .. extra_offsets[i + 1]), all at
// once with its own: a transfer holds a port of the sender and one of the receiver. No such lane
// may be in order or of unlimited capacity or in a contention. Both tables may be empty.
struct TaskGraph {
    std::vector<Lane> lanes;
    std::vector<Contention> contentions;
    std::vector<Task> tasks;
    std::vector<std::int64_t> offsets;
    std::vector<std::int32_t> predecessors;
    std::vector<std::int64_t> extra_offsets = {};
    std::vector<std::int32_t> extra_lanes = {};
    std::vector<double> stages = {};  // their capacities
    std::vector<Use> uses = {};       // at most one of a task
};

struct Schedule {
    std::vector<std::int64_t> start_ns;
    std::vector<std::int64_t> stop_ns;
};

// Runs the graph from time 0 and returns when each task starts and stops.
//
// Throws std::invalid_argument for an index out of range, a negative duration or an impossible
// lane, and std::runtime_error when tasks can never start (a cycle of dependencies and orders).
// Memory is linear in tasks and dependencies. O(tasks + dependencies) where all lanes are in order
// with a capacity of 1, or unlimited, nothing contends or shares a stage and dependencies are
// listed before what waits for them; else O((tasks + dependencies) log tasks), and a further log
// for each change of a speed.
[[nodiscard]] Schedule simulate(const TaskGraph& graph);

}  // namespace syncline
