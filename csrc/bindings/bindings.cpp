// Python bindings of the native core. Torch-free: lists and numpy arrays of integers and floats.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "decoupled.hpp"
#include "group_bindings.hpp"
#include "merge.hpp"
#include "overlap.hpp"
#include "pace.hpp"
#include "simulator.hpp"
#include "sparse_bindings.hpp"
#include "unlocked.hpp"

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
    const syncline::Unlocked unlocked;
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

std::tuple<std::int64_t, std::vector<std::tuple<std::size_t, std::int64_t, std::int64_t>>>
preemptive_order(const std::vector<std::int64_t>& ready_ns,
                 const std::vector<std::int64_t>& cost_ns,
                 const std::vector<std::int64_t>& tail_ns) {
    if (cost_ns.size() != ready_ns.size() || tail_ns.size() != ready_ns.size()) {
        throw std::invalid_argument("as many costs and tails as ready times are needed");
    }
    std::vector<syncline::Job> jobs;
    jobs.reserve(ready_ns.size());
    for (std::size_t i = 0; i < ready_ns.size(); ++i) {
        jobs.push_back({ready_ns[i], cost_ns[i], tail_ns[i]});
    }
    const syncline::Unlocked unlocked;
    const syncline::PreemptiveOrder order = syncline::preemptive_order(jobs);
    std::vector<std::tuple<std::size_t, std::int64_t, std::int64_t>> pieces;
    pieces.reserve(order.pieces.size());
    for (const auto& [job, start_ns, stop_ns] : order.pieces) {
        pieces.emplace_back(job, start_ns, stop_ns);
    }
    return {order.end_ns, std::move(pieces)};
}

std::vector<std::int64_t> fuse_balanced(const std::vector<std::int64_t>& ready_ns,
                                        const std::vector<std::int64_t>& size_bytes,
                                        const std::vector<std::int64_t>& tail_ns,
                                        std::int64_t base_ns,
                                        const std::vector<SegmentTuple>& segments) {
    const syncline::CostCurve curve = make_curve(segments);
    const syncline::Unlocked unlocked;
    return syncline::fuse_balanced(ready_ns, size_bytes, tail_ns, base_ns, curve);
}

using Slices = std::vector<std::tuple<std::int64_t, std::int64_t>>;  // start, stop in elements

syncline::Gradients make_gradients(const std::vector<std::int64_t>& ready_ns,
                                   const std::vector<std::int64_t>& elements,
                                   const std::vector<std::int64_t>& element_bytes,
                                   const std::vector<std::int64_t>& tail_ns, std::int32_t in_flight,
                                   const std::vector<SegmentTuple>& segments) {
    return {{ready_ns, elements, element_bytes, tail_ns, in_flight}, make_curve(segments)};
}

syncline::Messages make_messages(const syncline::Gradients& gradients, const Slices& slices) {
    syncline::Messages messages;
    messages.reserve(slices.size());
    for (const auto& [start, stop] : slices) {
        if (start >= stop) throw std::invalid_argument("a message of a round is not empty");
        messages.push_back(gradients.message(gradients.cut_at(start), gradients.cut_at(stop)));
    }
    return messages;
}

std::int64_t round_end(const std::vector<std::int64_t>& ready_ns,
                       const std::vector<std::int64_t>& elements,
                       const std::vector<std::int64_t>& element_bytes,
                       const std::vector<std::int64_t>& tail_ns, std::int32_t in_flight,
                       const std::vector<SegmentTuple>& segments, const Slices& messages) {
    const syncline::Gradients gradients =
        make_gradients(ready_ns, elements, element_bytes, tail_ns, in_flight, segments);
    return gradients.end_ns(make_messages(gradients, messages));
}

Slices overlap(const std::vector<std::int64_t>& ready_ns, const std::vector<std::int64_t>& elements,
               const std::vector<std::int64_t>& element_bytes,
               const std::vector<std::int64_t>& tail_ns, std::int32_t in_flight,
               const std::vector<SegmentTuple>& segments, const std::vector<Slices>& seeds,
               std::int64_t goal_ns, std::int64_t budget, std::int64_t exact_elements) {
    const syncline::Gradients gradients =
        make_gradients(ready_ns, elements, element_bytes, tail_ns, in_flight, segments);
    std::vector<syncline::Messages> from;
    for (const Slices& seed : seeds) from.push_back(make_messages(gradients, seed));
    const syncline::Unlocked unlocked;
    Slices slices;
    for (const syncline::Message& message :
         syncline::plan_overlap(gradients, from, {goal_ns, budget, exact_elements})) {
        slices.emplace_back(gradients.element(message.begin), gradients.element(message.end));
    }
    return slices;
}

using HalfTuple = std::tuple<std::int32_t, std::int32_t, bool>;  // first, last, gathered

// Ready times, sizes, tails and needs; the cost of a reduce-scatter or all-gather; the gap; the
// time of norms; messages in flight; whether all-gathers go last.
using DecoupledTuple =
    std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::vector<std::int64_t>,
               std::vector<std::int64_t>, std::vector<SegmentTuple>, std::int64_t, std::int64_t,
               std::int32_t, bool>;

syncline::DecoupledRound make_decoupled(const DecoupledTuple& round) {
    const auto& [ready_ns, size_bytes, tail_ns, need, segments, gap_ns, norm_ns, in_flight, last] =
        round;
    return {ready_ns, size_bytes, tail_ns,   need, make_curve(segments),
            gap_ns,   norm_ns,    in_flight, last};
}

std::int64_t decoupled_end(const DecoupledTuple& round, const std::vector<std::int32_t>& lasts,
                           const std::vector<HalfTuple>& order) {
    std::vector<syncline::Half> sent;
    for (const auto& [first, last, gathered] : order) sent.push_back({first, last, gathered});
    return syncline::decoupled_end(make_decoupled(round), lasts, sent);
}

std::tuple<std::vector<std::int32_t>, std::vector<HalfTuple>> decoupled(
    const DecoupledTuple& from, const std::vector<std::vector<std::int32_t>>& seeds,
    std::int64_t budget) {
    const syncline::DecoupledRound round = make_decoupled(from);
    syncline::DecoupledPlan plan;
    {
        const syncline::Unlocked unlocked;
        plan = syncline::plan_decoupled(round, seeds, budget);
    }
    std::vector<HalfTuple> order;
    for (const syncline::Half& half : plan.order) {
        order.emplace_back(half.first, half.last, half.gathered);
    }
    return {plan.lasts, order};
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

using Pair = std::tuple<std::int32_t, std::int32_t, double, double>;

nb::tuple simulate(const std::vector<std::tuple<std::int32_t, bool>>& lanes,
                   const std::vector<Pair>& contentions, const Array<std::int32_t>& task_lanes,
                   const Array<std::int64_t>& durations_ns, const Array<std::int32_t>& tasks,
                   const Array<std::int32_t>& before, const Array<std::int32_t>& holders,
                   const Array<std::int32_t>& held_lanes, const std::vector<double>& stages,
                   const Array<std::int32_t>& users, const Array<std::int32_t>& used,
                   const Array<double>& shares) {
    if (users.shape(0) != used.shape(0) || users.shape(0) != shares.shape(0)) {
        throw std::invalid_argument("as many stages and shares as users are needed");
    }
    if (task_lanes.shape(0) != durations_ns.shape(0)) {
        throw std::invalid_argument("as many lanes as durations are needed");
    }
    syncline::TaskGraph graph;
    for (const auto& [capacity, in_order] : lanes) graph.lanes.push_back({capacity, in_order});
    for (const auto& [a, b, of_a, of_b] : contentions) {
        graph.contentions.push_back({a, b, of_a, of_b});
    }
    graph.tasks.reserve(task_lanes.shape(0));
    for (std::size_t i = 0; i < task_lanes.shape(0); ++i) {
        graph.tasks.push_back({task_lanes.data()[i], durations_ns.data()[i]});
    }
    fill_table(tasks, before, graph.tasks.size(), graph.offsets, graph.predecessors);
    if (holders.shape(0)) {
        fill_table(holders, held_lanes, graph.tasks.size(), graph.extra_offsets, graph.extra_lanes);
    }
    graph.stages = stages;
    for (std::size_t i = 0; i < users.shape(0); ++i) {
        graph.uses.push_back({users.data()[i], used.data()[i], shares.data()[i]});
    }
    syncline::Schedule schedule;
    {
        const syncline::Unlocked unlocked;
        schedule = syncline::simulate(graph);
    }
    return nb::make_tuple(numpy(std::move(schedule.start_ns)), numpy(std::move(schedule.stop_ns)));
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Syncline's native core: the event simulator and what planners need.";
    bind_groups(module);
    bind_sparse(module);
    module.def("merge", &merge, nb::arg("ready_ns"), nb::arg("size_bytes"), nb::arg("segments"),
               "Return the last tensor of each message of the optimal backward-only merge.");
    module.def("costs", &costs, nb::arg("size_bytes"), nb::arg("segments"),
               "Return the cost in nanoseconds of a message of each size.");
    module.def("preemptive_order", &preemptive_order, nb::arg("ready_ns"), nb::arg("cost_ns"),
               nb::arg("tail_ns"), "Return max(arrival + tail) and the pieces of Jackson's rule.");
    module.def("fuse_balanced", &fuse_balanced, nb::arg("ready_ns"), nb::arg("size_bytes"),
               nb::arg("tail_ns"), nb::arg("base_ns"), nb::arg("segments"),
               "Return the last tensor of each group of PACE, Algorithm 1.");
    module.def("round_end", &round_end, nb::arg("ready_ns"), nb::arg("elements"),
               nb::arg("element_bytes"), nb::arg("tail_ns"), nb::arg("in_flight"),
               nb::arg("segments"), nb::arg("messages"),
               "Return max(arrival + tail) of slices of elements sent in this order.");
    module.def("overlap", &overlap, nb::arg("ready_ns"), nb::arg("elements"),
               nb::arg("element_bytes"), nb::arg("tail_ns"), nb::arg("in_flight"),
               nb::arg("segments"), nb::arg("seeds"), nb::arg("goal_ns"), nb::arg("budget"),
               nb::arg("exact_elements"),
               "Return slices of elements, in an order in which the round ends early.");
    module.def("decoupled_end", &decoupled_end, nb::arg("one"), nb::arg("lasts"), nb::arg("order"),
               "Return when a round ends whose updates wait for a norm.");
    module.def("decoupled", &decoupled, nb::arg("one"), nb::arg("seeds"), nb::arg("budget"),
               "Return the last tensors of groups, and an order in which such a round ends early.");
    module.def("simulate", &simulate, nb::arg("lanes"), nb::arg("contentions"),
               nb::arg("task_lanes"), nb::arg("durations_ns"), nb::arg("tasks"), nb::arg("before"),
               nb::arg("holders"), nb::arg("held_lanes"), nb::arg("stages"), nb::arg("users"),
               nb::arg("used"), nb::arg("shares"),
               "Run a task graph and return the start and stop of every task in nanoseconds.");
}
