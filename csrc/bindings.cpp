// The Python face of the native core. Torch-free: plain lists of integers and floats.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "merge.hpp"
#include "simulator.hpp"

namespace nb = nanobind;

namespace {

using SegmentTuple = std::tuple<std::int64_t, double, double>;  // start_bytes, cost_s, s_per_byte

syncline::CostCurve make_curve(const std::vector<SegmentTuple>& segments_s) {
    std::vector<syncline::CostSegment> segments;
    segments.reserve(segments_s.size());
    for (const auto& [start_bytes, cost_s, s_per_byte] : segments_s) {
        segments.push_back({start_bytes, cost_s * 1e9, s_per_byte * 1e9});
    }
    return syncline::CostCurve(std::move(segments));
}

std::vector<std::int64_t> merge(const std::vector<std::int64_t>& ready_ns,
                                const std::vector<std::int64_t>& size_bytes,
                                const std::vector<SegmentTuple>& segments) {
    const syncline::CostCurve curve = make_curve(segments);
    nb::gil_scoped_release unlocked;
    return syncline::merge_optimally(ready_ns, size_bytes, curve);
}

std::vector<std::int64_t> costs(const std::vector<std::int64_t>& size_bytes,
                                const std::vector<SegmentTuple>& segments) {
    const syncline::CostCurve curve = make_curve(segments);
    std::vector<std::int64_t> result;
    result.reserve(size_bytes.size());
    for (const std::int64_t size : size_bytes) result.push_back(curve(size));
    return result;
}

std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>> simulate(
    const std::vector<std::tuple<std::int32_t, bool>>& lanes,
    const std::vector<std::tuple<std::int32_t, std::int32_t, double>>& contentions,
    const std::vector<std::int32_t>& task_lanes, const std::vector<std::int64_t>& durations_ns,
    std::vector<std::int64_t> offsets, std::vector<std::int32_t> predecessors) {
    if (task_lanes.size() != durations_ns.size()) {
        throw std::invalid_argument("as many lanes as durations are needed");
    }
    syncline::TaskGraph graph;
    for (const auto& [capacity, in_order] : lanes) graph.lanes.push_back({capacity, in_order});
    for (const auto& [a, b, slowdown] : contentions) graph.contentions.push_back({a, b, slowdown});
    graph.tasks.reserve(task_lanes.size());
    for (std::size_t i = 0; i < task_lanes.size(); ++i) {
        graph.tasks.push_back({task_lanes[i], durations_ns[i]});
    }
    graph.offsets = std::move(offsets);
    graph.predecessors = std::move(predecessors);
    nb::gil_scoped_release unlocked;
    syncline::Schedule schedule = syncline::simulate(graph);
    return {std::move(schedule.start_ns), std::move(schedule.stop_ns)};
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Syncline's native core: the event simulator and what planners need.";
    module.def("merge", &merge, nb::arg("ready_ns"), nb::arg("size_bytes"), nb::arg("segments"),
               "Return the last tensor of each message of the optimal backward-only merge.");
    module.def("costs", &costs, nb::arg("size_bytes"), nb::arg("segments"),
               "Return the cost in nanoseconds of a message of each size.");
    module.def("simulate", &simulate, nb::arg("lanes"), nb::arg("contentions"),
               nb::arg("task_lanes"), nb::arg("durations_ns"), nb::arg("offsets"),
               nb::arg("predecessors"),
               "Run a task graph and return the start and stop of every task in nanoseconds.");
}
