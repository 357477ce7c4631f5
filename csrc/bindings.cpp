// The Python face of the native core. Torch-free: lists and numpy arrays of integers and floats.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Pairs (row, entry) in any order, as a table in compressed form: a stable counting sort.
void fill_table(const Array<std::int32_t>& rows, const Array<std::int32_t>& entries,
                std::size_t count, std::vector<std::int64_t>& offsets,
                std::vector<std::int32_t>& sorted) {
    const std::size_t pairs = rows.shape(0);
    if (entries.shape(0) != pairs) throw std::invalid_argument("pairs need two equal columns");
    offsets.assign(count + 1, 0);
    for (std::size_t k = 0; k < pairs; ++k) {
        const std::int32_t row = rows.data()[k];
        if (row < 0 || static_cast<std::size_t>(row) >= count) {
            throw std::invalid_argument("a pair is about a task that does not exist");
        }
        ++offsets[static_cast<std::size_t>(row) + 1];
    }
    for (std::size_t i = 0; i < count; ++i) offsets[i + 1] += offsets[i];
    sorted.resize(pairs);
    std::vector<std::int64_t> cursor(offsets.begin(), offsets.end() - 1);
    for (std::size_t k = 0; k < pairs; ++k) {
        const auto row = static_cast<std::size_t>(rows.data()[k]);
        sorted[static_cast<std::size_t>(cursor[row]++)] = entries.data()[k];
    }
}

// Hands a vector over to numpy without copying it.
nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>> numpy(std::vector<std::int64_t>&& values) {
    auto* kept = new std::vector<std::int64_t>(std::move(values));
    nb::capsule owner(kept,
                      [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
    return {kept->data(), {kept->size()}, owner};
}

nb::tuple simulate(const std::vector<std::tuple<std::int32_t, bool>>& lanes,
                   const std::vector<std::tuple<std::int32_t, std::int32_t, double>>& contentions,
                   const Array<std::int32_t>& task_lanes, const Array<std::int64_t>& durations_ns,
                   const Array<std::int32_t>& tasks, const Array<std::int32_t>& before,
                   const Array<std::int32_t>& holders, const Array<std::int32_t>& held_lanes) {
    if (task_lanes.shape(0) != durations_ns.shape(0)) {
        throw std::invalid_argument("as many lanes as durations are needed");
    }
    syncline::TaskGraph graph;
    for (const auto& [capacity, in_order] : lanes) graph.lanes.push_back({capacity, in_order});
    for (const auto& [a, b, slowdown] : contentions) graph.contentions.push_back({a, b, slowdown});
    graph.tasks.reserve(task_lanes.shape(0));
    for (std::size_t i = 0; i < task_lanes.shape(0); ++i) {
        graph.tasks.push_back({task_lanes.data()[i], durations_ns.data()[i]});
    }
    fill_table(tasks, before, graph.tasks.size(), graph.offsets, graph.predecessors);
    if (holders.shape(0)) {
        fill_table(holders, held_lanes, graph.tasks.size(), graph.extra_offsets, graph.extra_lanes);
    }
    syncline::Schedule schedule;
    {
        nb::gil_scoped_release unlocked;
        schedule = syncline::simulate(graph);
    }
    return nb::make_tuple(numpy(std::move(schedule.start_ns)), numpy(std::move(schedule.stop_ns)));
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Syncline's native core: the event simulator and what planners need.";
    module.def("merge", &merge, nb::arg("ready_ns"), nb::arg("size_bytes"), nb::arg("segments"),
               "Return the last tensor of each message of the optimal backward-only merge.");
    module.def("costs", &costs, nb::arg("size_bytes"), nb::arg("segments"),
               "Return the cost in nanoseconds of a message of each size.");
    module.def("simulate", &simulate, nb::arg("lanes"), nb::arg("contentions"),
               nb::arg("task_lanes"), nb::arg("durations_ns"), nb::arg("tasks"), nb::arg("before"),
               nb::arg("holders"), nb::arg("held_lanes"),
               "Run a task graph and return the start and stop of every task in nanoseconds.");
}
