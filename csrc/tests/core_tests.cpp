// Tests of the native core without Python: for the sanitizers, and for whoever changes the core.
//
//   cmake -S . -B build/asan -DSYNCLINE_TESTS=ON -DSYNCLINE_SANITIZE=address,undefined
//   cmake --build build/asan && ctest --test-dir build/asan
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cost_curve.hpp"
#include "merge.hpp"
#include "pace.hpp"
#include "simulator.hpp"

namespace {

using syncline::CostCurve;
using syncline::CostSegment;
using syncline::longest_ns;
using syncline::Schedule;
using syncline::TaskGraph;

struct Tally {
    int passed = 0;
    int failed = 0;
    bool test_failed = false;
};
Tally tally;

// The condition comes last, so that it may hold commas.
#define CHECK(...)                                                                         \
    do {                                                                                   \
        if (!(__VA_ARGS__)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            tally.test_failed = true;                                                      \
        }                                                                                  \
    } while (false)

// Whether `call` throws an Error whose text holds `part`.
template <typename Error, typename Call>
bool throws(Call call, std::string_view part) {
    try {
        call();
    } catch (const Error& error) {
        return std::string_view(error.what()).find(part) != std::string_view::npos;
    }
    return false;
}

using Random = std::mt19937_64;

std::int64_t uniform(Random& random, std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// --- cost curves ---

CostCurve steps() { return CostCurve({{0, 10.0, 1.0}, {100, 200.0, 0.5}, {200, 250.0, 0.0}}); }

void cost_is_read_piece_by_piece() {
    const CostCurve curve = steps();
    CHECK(curve(0) == 10);
    CHECK(curve(99) == 109);
    CHECK(curve(100) == 200);
    CHECK(curve(101) == 201);  // 200.5 rounds away from zero
    CHECK(curve(150) == 225);
    CHECK(curve(200) == 250);
    CHECK(curve(std::numeric_limits<std::int64_t>::max()) == 250);
}

void cost_never_falls() {
    const CostCurve curve = steps();
    for (std::int64_t size = 1; size < 400; ++size) CHECK(curve(size) >= curve(size - 1));
}

void cost_saturates() {
    const double infinity = std::numeric_limits<double>::infinity();
    CHECK(CostCurve({{0, 1e300, 0.0}})(5) == longest_ns + 1);
    CHECK(CostCurve({{0, 0.0, 1e300}})(1) == longest_ns + 1);
    CHECK(CostCurve({{0, 7.0, infinity}})(0) == 7);
    CHECK(CostCurve({{0, infinity, infinity}})(1) == longest_ns + 1);
    CHECK(CostCurve({{0, 0.0, 1.0}})(std::numeric_limits<std::int64_t>::max()) == longest_ns + 1);
}

void cost_refuses_what_is_no_curve() {
    using Segments = std::vector<CostSegment>;
    const auto make = [](Segments segments) { return [segments] { return CostCurve(segments); }; };
    CHECK(throws<std::invalid_argument>(make({}), "starts at 0 bytes"));
    CHECK(throws<std::invalid_argument>(make({{1, 1.0, 1.0}}), "starts at 0 bytes"));
    CHECK(throws<std::invalid_argument>(make({{0, 1.0, 1.0}, {0, 2.0, 1.0}}), "increasing order"));
    CHECK(throws<std::invalid_argument>(make({{0, 1.0, 1.0}, {9, 20.0, 1.0}, {5, 30.0, 1.0}}),
                                        "increasing order"));
}

// --- merge ---

std::int64_t finish(const std::vector<std::int64_t>& ready, const std::vector<std::int64_t>& sizes,
                    std::span<const std::int64_t> last_tensors, const CostCurve& cost) {
    std::int64_t clock = 0;
    std::size_t first = 0;
    for (const std::int64_t last_tensor : last_tensors) {
        const auto last = static_cast<std::size_t>(last_tensor);
        std::int64_t size = 0;
        for (std::size_t i = first; i <= last; ++i) size += sizes[i];
        clock = std::max(clock, ready[last]) + cost(size);
        first = last + 1;
    }
    return clock;
}

CostCurve random_curve(Random& random) {
    std::vector<CostSegment> segments{{0, static_cast<double>(uniform(random, 0, 500)),
                                       static_cast<double>(uniform(random, 0, 4))}};
    const std::int64_t more = uniform(random, 0, 3);
    for (std::int64_t k = 0; k < more; ++k) {
        const CostSegment& before = segments.back();
        const std::int64_t span = uniform(random, 1, 300);
        const double end = before.cost_ns + before.ns_per_byte * static_cast<double>(span);
        segments.push_back({before.start_bytes + span,
                            end + static_cast<double>(uniform(random, 0, 300)),
                            static_cast<double>(uniform(random, 0, 4))});
    }
    return CostCurve(segments);
}

void merge_matches_exhaustive_search() {
    Random random(1);
    for (int round = 0; round < 400; ++round) {
        const auto count = static_cast<std::size_t>(uniform(random, 1, 9));
        std::vector<std::int64_t> ready;
        std::vector<std::int64_t> sizes;
        std::int64_t clock = 0;
        for (std::size_t i = 0; i < count; ++i) {
            clock += uniform(random, 0, 2) == 0 ? 0 : uniform(random, 0, 600);
            ready.push_back(clock);
            sizes.push_back(uniform(random, 0, 2) == 0 ? 0 : uniform(random, 0, 200));
        }
        const CostCurve cost = random_curve(random);
        std::int64_t best = std::numeric_limits<std::int64_t>::max();
        for (std::uint32_t cuts = 0; cuts < (1U << (count - 1)); ++cuts) {
            std::vector<std::int64_t> last;
            for (std::size_t i = 0; i + 1 < count; ++i) {
                if ((cuts >> i & 1U) != 0) last.push_back(static_cast<std::int64_t>(i));
            }
            last.push_back(static_cast<std::int64_t>(count - 1));
            best = std::min(best, finish(ready, sizes, last, cost));
        }
        const std::vector<std::int64_t> found = syncline::merge_optimally(ready, sizes, cost);
        CHECK(finish(ready, sizes, found, cost) == best);
        CHECK(std::ranges::is_sorted(found));
        CHECK(found.back() == static_cast<std::int64_t>(count - 1));
    }
}

void merge_of_many_is_no_worse_than_all_or_nothing() {
    Random random(2);
    const std::size_t count = 3000;
    std::vector<std::int64_t> ready;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> each;
    std::int64_t clock = 0;
    for (std::size_t i = 0; i < count; ++i) {
        clock += uniform(random, 0, 2000);
        ready.push_back(clock);
        sizes.push_back(uniform(random, 0, 1000));
        each.push_back(static_cast<std::int64_t>(i));
    }
    const CostCurve cost({{0, 1000.0, 1.0}});
    const std::vector<std::int64_t> found = syncline::merge_optimally(ready, sizes, cost);
    const std::int64_t best = finish(ready, sizes, found, cost);
    CHECK(best <= finish(ready, sizes, each, cost));
    CHECK(best <= finish(ready, sizes, std::vector{each.back()}, cost));
}

// The recurrence as it stands, of equals the first.
std::vector<std::int64_t> merge_as_defined(const std::vector<std::int64_t>& ready,
                                           const std::vector<std::int64_t>& sizes,
                                           const CostCurve& cost) {
    std::vector<std::int64_t> finish(ready.size() + 1, 0);
    std::vector<std::size_t> cut(ready.size() + 1, 0);
    for (std::size_t j = 1; j <= ready.size(); ++j) {
        std::size_t first = j - 1;
        while (first > 0 && finish[first] > ready[j - 1]) --first;
        finish[j] = std::numeric_limits<std::int64_t>::max();
        for (std::size_t i = first; i < j; ++i) {
            const std::int64_t bytes = std::accumulate(sizes.begin() + static_cast<long>(i),
                                                       sizes.begin() + static_cast<long>(j), 0L);
            const std::int64_t stop = std::max(finish[i], ready[j - 1]) + cost(bytes);
            if (stop < finish[j]) {
                finish[j] = stop;
                cut[j] = i;
            }
        }
    }
    std::vector<std::int64_t> last;
    for (std::size_t j = ready.size(); j > 0; j = cut[j]) {
        last.insert(last.begin(), static_cast<std::int64_t>(j - 1));
    }
    return last;
}

// So many are ready at once that runs of cuts are skipped: the messages stay the same.
void merge_skips_only_what_cannot_win() {
    Random random(3);
    for (int round = 0; round < 60; ++round) {
        const auto count = static_cast<std::size_t>(uniform(random, 200, 500));
        const std::int64_t most = std::int64_t{1} << uniform(random, 0, 24);
        const std::int64_t pause = round % 3 == 0 ? 0 : most * 20;
        std::vector<std::int64_t> ready, sizes;
        std::int64_t clock = 0;
        for (std::size_t i = 0; i < count; ++i) {
            clock += uniform(random, 0, 99) == 0 ? uniform(random, 0, pause) : 0;
            ready.push_back(clock);
            sizes.push_back(uniform(random, 0, 5) == 0 ? 0 : uniform(random, 0, most));
        }
        std::vector<CostSegment> segments{{0, round % 4 == 0 ? 0.0 : 1000.0 / 7, 0.3}};
        for (std::int64_t k = uniform(random, 0, 3); k > 0; --k) {
            const CostSegment& before = segments.back();
            const std::int64_t span = uniform(random, 1, 40 * most);
            segments.push_back(
                {before.start_bytes + span,
                 before.cost_ns + before.ns_per_byte * static_cast<double>(span),
                 before.ns_per_byte * static_cast<double>(uniform(random, 0, 30)) / 10});
        }
        if (round % 20 == 19) segments.back().ns_per_byte = 1e300;
        const CostCurve cost(segments);
        CHECK(syncline::merge_optimally(ready, sizes, cost) ==
              merge_as_defined(ready, sizes, cost));
    }
}

void merge_of_nothing_is_nothing() { CHECK(syncline::merge_optimally({}, {}, steps()).empty()); }

void merge_refuses_what_it_cannot_read() {
    using Numbers = std::vector<std::int64_t>;
    const auto merge = [](Numbers ready, Numbers sizes) {
        return [ready, sizes] { return syncline::merge_optimally(ready, sizes, steps()); };
    };
    CHECK(throws<std::invalid_argument>(merge({1}, {}), "as many sizes"));
    CHECK(throws<std::invalid_argument>(merge({2, 1}, {1, 1}), "decrease"));
    CHECK(throws<std::invalid_argument>(merge({1, 2}, {1, -1}), "negative"));
    const std::int64_t half = std::int64_t{1} << 62;
    CHECK(throws<std::invalid_argument>(merge({1, 2}, {half, half}), "64 bits"));
    const std::int64_t last = std::numeric_limits<std::int64_t>::max();
    CHECK(throws<std::invalid_argument>(merge({1, last - 100}, {1, 1}), "64 bits"));
}

void merge_stays_in_range_at_the_largest_values() {
    const std::vector<std::int64_t> ready(200, longest_ns);
    const std::vector<std::int64_t> sizes(200, std::int64_t{1} << 50);
    const auto found = syncline::merge_optimally(ready, sizes, CostCurve({{0, 1e300, 1e300}}));
    CHECK(found.back() == 199);
}

// --- PACE ---

using Jobs = std::vector<syncline::Job>;

Jobs random_jobs(Random& random) {
    Jobs jobs(static_cast<std::size_t>(uniform(random, 1, 7)));
    for (syncline::Job& job : jobs) {
        job = {uniform(random, 0, 15), uniform(random, 0, 6), uniform(random, 0, 20)};
    }
    return jobs;
}

std::int64_t slot_by_slot(const Jobs& jobs) {
    std::vector<std::int64_t> left;
    std::int64_t end = 0;
    for (const syncline::Job& job : jobs) {
        left.push_back(job.cost_ns);
        if (job.cost_ns == 0) end = std::max(end, job.ready_ns + job.tail_ns);
    }
    for (std::int64_t slot = 0; slot < 100; ++slot) {
        std::optional<std::size_t> chosen;
        for (std::size_t i = 0; i < jobs.size(); ++i) {
            if (left[i] == 0 || jobs[i].ready_ns > slot) continue;
            if (!chosen || jobs[i].tail_ns > jobs[*chosen].tail_ns) chosen = i;
        }
        if (chosen && --left[*chosen] == 0) end = std::max(end, slot + 1 + jobs[*chosen].tail_ns);
    }
    return end;
}

void preemptive_order_matches_slot_by_slot() {
    Random random(11);
    for (int round = 0; round < 2000; ++round) {
        const Jobs jobs = random_jobs(random);
        const syncline::PreemptiveOrder order = syncline::preemptive_order(jobs);
        CHECK(order.end_ns == slot_by_slot(jobs));
        CHECK(order.pieces.size() < 2 * jobs.size());
        std::vector<std::int64_t> sent(jobs.size(), 0);
        std::int64_t free = 0;
        for (const auto& [job, start_ns, stop_ns] : order.pieces) {
            CHECK(start_ns >= free && start_ns >= jobs[job].ready_ns && stop_ns >= start_ns);
            sent[job] += stop_ns - start_ns;
            free = stop_ns;
        }
        for (std::size_t i = 0; i < jobs.size(); ++i) CHECK(sent[i] == jobs[i].cost_ns);
    }
    CHECK(syncline::preemptive_order({}).pieces.empty());
}

// The smallest group of every partition of a short chain, and no smaller one than the fusion's.
void fusion_matches_every_partition() {
    Random random(12);
    for (int round = 0; round < 1000; ++round) {
        const auto count = static_cast<std::size_t>(uniform(random, 1, 9));
        std::vector<std::int64_t> ready(count);
        std::vector<std::int64_t> sizes(count);
        std::vector<std::int64_t> tails(count);
        for (std::size_t i = 0; i < count; ++i) {
            ready[i] = uniform(random, 0, 300);
            sizes[i] = uniform(random, 1, 200);
            tails[i] = uniform(random, 0, 300);
        }
        std::ranges::sort(ready);
        const CostCurve cost = random_curve(random);
        const auto found = syncline::fuse_balanced(ready, sizes, tails, 0, cost);
        CHECK(!found.empty() && found.back() == static_cast<std::int64_t>(count) - 1);
        const auto smallest = [&](std::span<const std::int64_t> last_tensors) {
            std::int64_t least = std::numeric_limits<std::int64_t>::max();
            std::size_t first = 0;
            for (const std::int64_t last : last_tensors) {
                std::int64_t size = 0;
                for (; first <= static_cast<std::size_t>(last); ++first) size += sizes[first];
                least = std::min(least, size);
            }
            return least;
        };
        std::int64_t best = 0;
        for (unsigned cuts = 0; cuts < 1U << (count - 1); ++cuts) {
            std::vector<std::int64_t> last_tensors;
            for (std::size_t i = 0; i + 1 < count; ++i) {
                if (cuts >> i & 1U) last_tensors.push_back(static_cast<std::int64_t>(i));
            }
            last_tensors.push_back(static_cast<std::int64_t>(count) - 1);
            if (last_tensors.size() == found.size()) best = std::max(best, smallest(last_tensors));
        }
        CHECK(smallest(found) == best);
    }
}

void pace_refuses_what_it_cannot_read() {
    using Numbers = std::vector<std::int64_t>;
    const auto fuse = [](Numbers ready, Numbers sizes, Numbers tails) {
        return [=] { (void)syncline::fuse_balanced(ready, sizes, tails, 0, steps()); };
    };
    CHECK(throws<std::invalid_argument>(fuse({1}, {}, {1}), "as many sizes"));
    CHECK(throws<std::invalid_argument>(fuse({2, 1}, {1, 1}, {0, 0}), "decrease"));
    CHECK(throws<std::invalid_argument>(fuse({1, 2}, {1, 0}, {0, 0}), "positive"));
    CHECK(throws<std::invalid_argument>(fuse({1}, {1}, {-1}), "negative"));
    const std::int64_t half = std::numeric_limits<std::int64_t>::max() / 2 + 1;
    CHECK(throws<std::invalid_argument>(fuse({1, 2}, {half, half}, {0, 0}), "64 bits"));
    const Jobs many(syncline::most_jobs + 1);
    CHECK(throws<std::invalid_argument>([&] { (void)syncline::preemptive_order(many); },
                                        "too many jobs"));
    CHECK(syncline::fuse_balanced({}, {}, {}, 0, steps()).empty());
}

void pace_stays_in_range_at_the_largest_values() {
    const Jobs jobs(syncline::most_jobs, {longest_ns, longest_ns + 1, longest_ns});
    const auto count = static_cast<std::int64_t>(syncline::most_jobs);
    CHECK(syncline::preemptive_order(jobs).end_ns == 2 * longest_ns + count * (longest_ns + 1));
    const std::vector<std::int64_t> times(300, longest_ns);
    const std::vector<std::int64_t> sizes(300, std::int64_t{1} << 53);
    const CostCurve dear({{0, 1e300, 1e300}});
    CHECK(syncline::fuse_balanced(times, sizes, times, 0, dear).size() == 1);
}

// --- simulator ---

void add_task(TaskGraph& graph, std::int32_t lane, std::int64_t duration_ns,
              const std::vector<std::int32_t>& after = {}) {
    if (graph.offsets.empty()) graph.offsets.push_back(0);
    graph.tasks.push_back({lane, duration_ns});
    graph.predecessors.insert(graph.predecessors.end(), after.begin(), after.end());
    graph.offsets.push_back(static_cast<std::int64_t>(graph.predecessors.size()));
}

TaskGraph on_lanes(std::vector<syncline::Lane> lanes) {
    TaskGraph graph;
    graph.lanes = std::move(lanes);
    graph.offsets.push_back(0);
    return graph;
}

TaskGraph random_graph(Random& random, std::size_t tasks, bool cyclic) {
    TaskGraph graph;
    const std::int64_t lanes = uniform(random, 1, 4);
    for (std::int64_t i = 0; i < lanes; ++i) {
        graph.lanes.push_back(
            {static_cast<std::int32_t>(uniform(random, 1, 3)), uniform(random, 0, 1) == 1});
    }
    graph.offsets.push_back(0);
    const auto count = static_cast<std::int64_t>(tasks);
    for (std::int64_t task = 0; task < count; ++task) {
        std::vector<std::int32_t> after;
        for (std::int64_t k = uniform(random, 0, 2); k > 0 && (cyclic || task > 0); --k) {
            after.push_back(
                static_cast<std::int32_t>(uniform(random, 0, (cyclic ? count : task) - 1)));
        }
        add_task(graph, static_cast<std::int32_t>(uniform(random, 0, lanes - 1)),
                 uniform(random, 0, 2) == 0 ? 0 : uniform(random, 1, 20), after);
    }
    return graph;
}

// One instant after another, with no queue and no index: O(tasks^2) an instant. Nothing if a task
// never starts. Without contention.
std::optional<Schedule> simulate_slowly(const TaskGraph& graph) {
    const std::size_t count = graph.tasks.size();
    Schedule schedule{std::vector<std::int64_t>(count, -1), std::vector<std::int64_t>(count, -1)};
    std::vector<bool> running(count, false);
    std::int64_t now = 0;
    for (;;) {
        for (bool moved = true; moved;) {
            moved = false;
            for (std::size_t i = 0; i < count; ++i) {
                if (running[i] && schedule.start_ns[i] + graph.tasks[i].duration_ns == now) {
                    running[i] = false;
                    schedule.stop_ns[i] = now;
                    moved = true;
                }
            }
            for (std::size_t lane = 0; lane < graph.lanes.size(); ++lane) {
                std::int32_t busy = 0;
                for (std::size_t i = 0; i < count; ++i) {
                    const bool here = graph.tasks[i].lane == static_cast<std::int32_t>(lane);
                    if (here && running[i]) ++busy;
                }
                for (std::size_t i = 0; i < count && busy < graph.lanes[lane].capacity; ++i) {
                    if (graph.tasks[i].lane != static_cast<std::int32_t>(lane)) continue;
                    if (schedule.start_ns[i] >= 0) continue;
                    bool ready = true;
                    for (auto k = graph.offsets[i]; k < graph.offsets[i + 1]; ++k) {
                        const auto before = graph.predecessors[static_cast<std::size_t>(k)];
                        ready = ready && schedule.stop_ns[static_cast<std::size_t>(before)] >= 0;
                    }
                    if (ready) {
                        schedule.start_ns[i] = now;
                        running[i] = true;
                        ++busy;
                        moved = true;
                    } else if (graph.lanes[lane].in_order) {
                        break;
                    }
                }
            }
        }
        std::int64_t next = std::numeric_limits<std::int64_t>::max();
        for (std::size_t i = 0; i < count; ++i) {
            if (running[i])
                next = std::min(next, schedule.start_ns[i] + graph.tasks[i].duration_ns);
        }
        if (next == std::numeric_limits<std::int64_t>::max()) break;
        now = next;
    }
    if (std::ranges::find(schedule.stop_ns, -1) != schedule.stop_ns.end()) return std::nullopt;
    return schedule;
}

bool same(const Schedule& a, const Schedule& b) {
    return a.start_ns == b.start_ns && a.stop_ns == b.stop_ns;
}

void simulator_matches_brute_force() {
    Random random(3);
    for (int round = 0; round < 500; ++round) {
        const auto tasks = static_cast<std::size_t>(uniform(random, 0, 16));
        const TaskGraph graph = random_graph(random, tasks, round % 2 == 0);
        const std::optional<Schedule> expected = simulate_slowly(graph);
        if (expected) {
            CHECK(same(syncline::simulate(graph), *expected));
        } else {
            CHECK(throws<std::runtime_error>([&] { return syncline::simulate(graph); },
                                             "in a cycle"));
        }
    }
}

void simulator_runs_an_empty_graph() {
    CHECK(syncline::simulate(on_lanes({})).start_ns.empty());
    CHECK(syncline::simulate(on_lanes({{1, true}})).stop_ns.empty());
}

void simulator_slows_lanes_that_contend() {
    for (const double slowdown : {1.0, 1.5, 2.0, 4.0, 100.0}) {
        TaskGraph graph = on_lanes({{1, true}, {1, true}});
        graph.contentions.push_back({0, 1, slowdown, slowdown});
        add_task(graph, 0, 1'000'000);
        add_task(graph, 1, 3'000'000);
        const Schedule schedule = syncline::simulate(graph);
        // The shorter runs slowed to its end, the longer has done as much by then.
        const double shorter = 1e6 * slowdown;
        CHECK(std::abs(static_cast<double>(schedule.stop_ns[0]) - shorter) <= shorter * 1e-3);
        CHECK(std::abs(static_cast<double>(schedule.stop_ns[1]) - (shorter + 2e6)) <=
              shorter * 1e-3);
    }
    TaskGraph graph = on_lanes({{1, true}, {1, true}});
    graph.contentions.push_back({0, 1, 2.0, 2.0});
    add_task(graph, 0, 700);
    add_task(graph, 1, 700);
    CHECK(syncline::simulate(graph).stop_ns == std::vector<std::int64_t>{1400, 1400});
    graph.contentions = {{0, 1, 1.0, 2.0}};
    CHECK(syncline::simulate(graph).stop_ns == std::vector<std::int64_t>{700, 1050});
    graph.contentions = {{0, 1, 2.0, 1.0}};
    CHECK(syncline::simulate(graph).stop_ns == std::vector<std::int64_t>{1050, 700});
}

// With contention: what no schedule may break, and that a second run gives the same.
void simulator_obeys_the_rules_under_contention() {
    Random random(4);
    for (int round = 0; round < 200; ++round) {
        TaskGraph graph = random_graph(random, 40, false);
        const auto lanes = static_cast<std::int32_t>(graph.lanes.size());
        for (std::int32_t a = 0; a < lanes; ++a) {
            for (std::int32_t b = 0; b < a; ++b) {
                if (uniform(random, 0, 1) == 0) continue;
                graph.contentions.push_back(
                    {a, b, 1.0 + static_cast<double>(uniform(random, 0, 30)) / 10.0,
                     1.0 + static_cast<double>(uniform(random, 0, 30)) / 10.0});
            }
        }
        const Schedule schedule = syncline::simulate(graph);
        CHECK(same(schedule, syncline::simulate(graph)));
        for (std::size_t i = 0; i < graph.tasks.size(); ++i) {
            const std::int64_t took = schedule.stop_ns[i] - schedule.start_ns[i];
            CHECK(took >= graph.tasks[i].duration_ns);
            CHECK(took <= 4 * graph.tasks[i].duration_ns + 40);
            for (auto k = graph.offsets[i]; k < graph.offsets[i + 1]; ++k) {
                const auto before = graph.predecessors[static_cast<std::size_t>(k)];
                CHECK(schedule.stop_ns[static_cast<std::size_t>(before)] <= schedule.start_ns[i]);
            }
            std::int32_t beside = 0;  // tasks of the lane that run when this one starts
            for (std::size_t j = 0; j < graph.tasks.size(); ++j) {
                if (graph.tasks[j].lane != graph.tasks[i].lane) continue;
                const bool runs = schedule.start_ns[j] <= schedule.start_ns[i] &&
                                  schedule.start_ns[i] < schedule.stop_ns[j];
                if (runs) ++beside;
            }
            CHECK(beside <= graph.lanes[static_cast<std::size_t>(graph.tasks[i].lane)].capacity);
        }
    }
}

void simulator_refuses_what_is_no_graph() {
    using Error = std::invalid_argument;
    const auto run = [](TaskGraph graph) { return [graph] { return syncline::simulate(graph); }; };
    TaskGraph good = on_lanes({{1, true}, {1, true}});
    add_task(good, 0, 1);
    add_task(good, 1, 1, {0});

    CHECK(throws<Error>(run(TaskGraph{}), "dependency table"));
    TaskGraph graph = good;
    graph.offsets.pop_back();
    CHECK(throws<Error>(run(graph), "dependency table"));
    graph = good;
    graph.offsets.front() = 1;
    CHECK(throws<Error>(run(graph), "dependency table"));
    graph = good;
    graph.predecessors.clear();
    CHECK(throws<Error>(run(graph), "dependency table"));
    graph = good;
    graph.offsets[1] = 5;
    CHECK(throws<Error>(run(graph), "offsets decrease"));
    graph = good;
    graph.offsets[1] = -1;
    CHECK(throws<Error>(run(graph), "offsets decrease"));
    for (const std::int32_t lane : {-1, 2}) {
        graph = good;
        graph.tasks[0].lane = lane;
        CHECK(throws<Error>(run(graph), "no such lane"));
    }
    for (const std::int64_t duration_ns : {std::int64_t{-1}, longest_ns + 1}) {
        graph = good;
        graph.tasks[0].duration_ns = duration_ns;
        CHECK(throws<Error>(run(graph), "out of range"));
    }
    for (const std::int32_t before : {-1, 2}) {
        graph = good;
        graph.predecessors[0] = before;
        CHECK(throws<Error>(run(graph), "does not exist"));
    }
    graph = good;
    graph.lanes[0].capacity = -1;
    CHECK(throws<Error>(run(graph), "capacity"));
    graph = good;
    graph.extra_lanes = {1};
    CHECK(throws<Error>(run(graph), "extra lane table"));
    graph.extra_offsets = {0, 1, 1};
    CHECK(throws<Error>(run(graph), "several lanes"));
    graph.lanes[0].in_order = graph.lanes[1].in_order = false;
    CHECK(syncline::simulate(graph).stop_ns == std::vector<std::int64_t>{1, 2});
    graph.extra_lanes = {0};
    CHECK(throws<Error>(run(graph), "or one twice"));
    const std::vector<syncline::Contention> impossible{
        {0, 0, 2.0, 2.0}, {0, 2, 2.0, 2.0},   {-1, 0, 2.0, 2.0},         {0, 1, 0.9, 2.0},
        {0, 1, 2.0, 0.9}, {0, 1, 101.0, 2.0}, {0, 1, std::nan(""), 2.0}, {0, 1, 2.0, std::nan("")}};
    for (const syncline::Contention& contention : impossible) {
        graph = good;
        graph.contentions.push_back(contention);
        CHECK(throws<Error>(run(graph), "contention"));
    }
    graph = on_lanes({{1, true}});
    for (int i = 0; i < 513; ++i) add_task(graph, 0, longest_ns);
    CHECK(throws<Error>(run(graph), "more than a year"));
}

void simulator_finds_cycles() {
    TaskGraph self = on_lanes({{1, false}});
    add_task(self, 0, 1, {0});
    CHECK(throws<std::runtime_error>([&] { return syncline::simulate(self); },
                                     "1 of them never start"));
    TaskGraph order = on_lanes({{1, true}});  // no cycle of dependencies, but of orders
    add_task(order, 0, 1, {1});
    add_task(order, 0, 1);
    CHECK(throws<std::runtime_error>([&] { return syncline::simulate(order); },
                                     "2 of them never start"));
}

void simulator_stays_in_range_at_the_largest_values() {
    TaskGraph graph = on_lanes({{1, true}, {1, true}});
    graph.contentions.push_back({0, 1, 100.0, 100.0});
    for (int i = 0; i < 256; ++i) {
        add_task(graph, 0, longest_ns);
        add_task(graph, 1, longest_ns);
    }
    const Schedule schedule = syncline::simulate(graph);
    CHECK(schedule.stop_ns[1] >= 100 * longest_ns);
    CHECK(schedule.stop_ns[511] == 256 * schedule.stop_ns[1]);
}

// For ThreadSanitizer: the core has no state of its own.
void many_threads_work_at_once() {
    Random random(5);
    TaskGraph graph = random_graph(random, 2000, false);
    if (graph.lanes.size() > 1) graph.contentions.push_back({0, 1, 1.5, 1.5});
    const CostCurve cost = random_curve(random);
    const std::vector<std::int64_t> ready(500, 7);
    const std::vector<std::int64_t> sizes(500, 3);
    const Schedule expected = syncline::simulate(graph);
    const std::vector<std::int64_t> cuts = syncline::merge_optimally(ready, sizes, cost);
    std::vector<char> equal(6, 0);
    {
        std::vector<std::jthread> threads;
        for (std::size_t i = 0; i < equal.size(); ++i) {
            threads.emplace_back([&, i] {
                bool all = true;
                for (int round = 0; round < 5; ++round) {
                    all = all && same(syncline::simulate(graph), expected);
                    all = all && syncline::merge_optimally(ready, sizes, cost) == cuts;
                }
                equal[i] = all ? 1 : 0;
            });
        }
    }
    CHECK(std::ranges::count(equal, 1) == 6);
}

struct Test {
    const char* name;
    void (*run)();
};

constexpr Test tests[] = {
    {"cost_is_read_piece_by_piece", cost_is_read_piece_by_piece},
    {"cost_never_falls", cost_never_falls},
    {"cost_saturates", cost_saturates},
    {"cost_refuses_what_is_no_curve", cost_refuses_what_is_no_curve},
    {"merge_matches_exhaustive_search", merge_matches_exhaustive_search},
    {"merge_of_many_is_no_worse_than_all_or_nothing",
     merge_of_many_is_no_worse_than_all_or_nothing},
    {"merge_skips_only_what_cannot_win", merge_skips_only_what_cannot_win},
    {"merge_of_nothing_is_nothing", merge_of_nothing_is_nothing},
    {"merge_refuses_what_it_cannot_read", merge_refuses_what_it_cannot_read},
    {"merge_stays_in_range_at_the_largest_values", merge_stays_in_range_at_the_largest_values},
    {"preemptive_order_matches_slot_by_slot", preemptive_order_matches_slot_by_slot},
    {"fusion_matches_every_partition", fusion_matches_every_partition},
    {"pace_refuses_what_it_cannot_read", pace_refuses_what_it_cannot_read},
    {"pace_stays_in_range_at_the_largest_values", pace_stays_in_range_at_the_largest_values},
    {"simulator_matches_brute_force", simulator_matches_brute_force},
    {"simulator_runs_an_empty_graph", simulator_runs_an_empty_graph},
    {"simulator_slows_lanes_that_contend", simulator_slows_lanes_that_contend},
    {"simulator_obeys_the_rules_under_contention", simulator_obeys_the_rules_under_contention},
    {"simulator_refuses_what_is_no_graph", simulator_refuses_what_is_no_graph},
    {"simulator_finds_cycles", simulator_finds_cycles},
    {"simulator_stays_in_range_at_the_largest_values",
     simulator_stays_in_range_at_the_largest_values},
    {"many_threads_work_at_once", many_threads_work_at_once},
};

}  // namespace

int main() {
    for (const Test& test : tests) {
        tally.test_failed = false;
        try {
            test.run();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "unexpected: %s\n", error.what());
            tally.test_failed = true;
        }
        ++(tally.test_failed ? tally.failed : tally.passed);
        if (tally.test_failed) std::fprintf(stderr, "FAILED %s\n", test.name);
    }
    std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
    return tally.failed == 0 ? 0 : 1;
}
