// Tests of the planner that merges, splits and orders, for the sanitizers.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "decoupled.hpp"
#include "dispatch.hpp"
#include "gradients.hpp"
#include "improve.hpp"
#include "overlap.hpp"
#include "rearrange.hpp"

namespace {

using syncline::Atom;
using syncline::CostCurve;
using syncline::Gradients;
using syncline::longest_ns;
using syncline::Messages;
using syncline::Round;

using Random = std::mt19937_64;

std::int64_t uniform(Random& random, std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

Round random_round(Random& random, std::int64_t tensors, std::int64_t most_elements) {
    Round round;
    std::int64_t ready = 0;
    for (std::int64_t i = 0; i < tensors; ++i) {
        ready += uniform(random, 0, 2) == 0 ? 0 : uniform(random, 0, 30);
        round.ready_ns.push_back(ready);
        round.elements.push_back(uniform(random, 1, most_elements));
        round.element_bytes.push_back(uniform(random, 1, 2));
        round.tail_ns.push_back(uniform(random, 0, 60));
    }
    round.in_flight = static_cast<std::int32_t>(uniform(random, 1, 2));
    return round;
}

CostCurve random_curve(Random& random) {
    const auto a = static_cast<double>(uniform(random, 0, 40));
    const auto b = static_cast<double>(uniform(random, 0, 10));
    const auto jump = static_cast<double>(uniform(random, 0, 20));
    const auto c = static_cast<double>(uniform(random, 0, 10));
    return CostCurve({{0, a, b}, {5, a + 5 * b + jump, c}});
}

// Whether the messages hold every element once.
bool complete(const Gradients& gradients, Messages messages) {
    std::ranges::sort(messages, {}, &syncline::Message::begin);
    std::int64_t covered = 0;
    for (const syncline::Message& message : messages) {
        if (gradients.element(message.begin) != covered) return false;
        covered = gradients.element(message.end);
        if (message.begin >= message.end) return false;
    }
    return covered == gradients.all_elements();
}

std::vector<Atom> all_atoms(const Gradients& gradients) {
    std::vector<Atom> atoms;
    for (std::int64_t e = 0; e < gradients.all_elements(); ++e) {
        atoms.push_back({gradients.cut_at(e), gradients.cut_at(e + 1)});
    }
    return atoms;
}

// The best of all cuts in all orders.
std::int64_t best_of_all(const Gradients& gradients) {
    const std::vector<Atom> atoms = all_atoms(gradients);
    std::int64_t best = std::numeric_limits<std::int64_t>::max();
    for (std::uint32_t cuts = 0; cuts < 1U << (atoms.size() - 1); ++cuts) {
        std::vector<std::pair<std::int64_t, std::int64_t>> slices{{0, 1}};
        for (std::size_t i = 1; i < atoms.size(); ++i) {
            const auto e = static_cast<std::int64_t>(i);
            if ((cuts >> (i - 1) & 1U) != 0) slices.push_back({e, e});
            ++slices.back().second;
        }
        do {
            Messages messages;
            for (const auto& [start, stop] : slices) {
                messages.push_back(
                    gradients.message(gradients.cut_at(start), gradients.cut_at(stop)));
            }
            best = std::min(best, gradients.end_ns(messages));
        } while (std::ranges::next_permutation(slices).found);
    }
    return best;
}

void rearranging_is_exact() {
    Random random(1);
    for (int trial = 0; trial < 60; ++trial) {
        const Gradients gradients(random_round(random, uniform(random, 1, 3), 2),
                                  random_curve(random));
        const std::int64_t best = best_of_all(gradients);
        const std::vector<Atom> atoms = all_atoms(gradients);
        const Messages found = rearrange(gradients, atoms, {}, {}, best + 1);
        CHECK(complete(gradients, found));
        CHECK(gradients.end_ns(found) == best);
        CHECK(rearrange(gradients, atoms, {}, {}, best).empty());
    }
}

void an_outlook_tells_what_sending_does() {
    Random random(2);
    for (int trial = 0; trial < 500; ++trial) {
        const bool overlap = uniform(random, 0, 1) == 1;
        const std::int64_t latency = uniform(random, 0, 20);
        std::vector<syncline::Transfer> transfers(static_cast<std::size_t>(uniform(random, 0, 6)));
        for (syncline::Transfer& transfer : transfers) {
            transfer = {uniform(random, 0, 90), uniform(random, 0, 30), uniform(random, 0, 50)};
        }
        syncline::Outlook outlook;
        for (auto transfer = transfers.rbegin(); transfer != transfers.rend(); ++transfer) {
            outlook = outlook.before(*transfer, latency, overlap);
        }
        syncline::Channel channel;
        channel.transmission_free_ns = uniform(random, 0, 80);
        channel.latency_free_ns = overlap ? uniform(random, 0, 80) : channel.transmission_free_ns;
        const std::int64_t found = outlook(channel);
        std::int64_t end = syncline::never;
        for (const syncline::Transfer& transfer : transfers) {
            end = std::max(end, channel.send(transfer, latency, overlap) + transfer.tail_ns);
        }
        CHECK(transfers.empty() ? found < 0 : found == end);
    }
}

void dispatching_sends_everything() {
    Random random(3);
    for (int trial = 0; trial < 400; ++trial) {
        const Gradients gradients(random_round(random, uniform(random, 1, 12), 40),
                                  random_curve(random));
        const Messages sent =
            dispatch(gradients, {uniform(random, 0, 900), uniform(random, 0, 60),
                                 uniform(random, 0, 40), uniform(random, 0, 1) == 1});
        CHECK(complete(gradients, sent));
        Messages ordered = sent;
        std::ranges::sort(ordered, {}, &syncline::Message::begin);
        CHECK(complete(gradients, longest_tail_first(gradients, ordered)));
    }
}

void improving_never_makes_worse() {
    Random random(4);
    for (int trial = 0; trial < 100; ++trial) {
        const Gradients gradients(random_round(random, uniform(random, 1, 9), 9),
                                  random_curve(random));
        Messages start;
        for (const Atom& atom : all_atoms(gradients)) {
            start.push_back(gradients.message(atom.begin, atom.end));
        }
        std::ranges::shuffle(start, random);
        std::int64_t budget = 50'000;
        const Messages better = improve(gradients, start, 0, budget, true);
        CHECK(complete(gradients, better));
        CHECK(gradients.end_ns(better) <= gradients.end_ns(start));
        const std::int64_t limit = gradients.end_ns(better) + uniform(random, 0, 20);
        const Messages fewer = tidy(gradients, better, limit);
        CHECK(complete(gradients, fewer));
        CHECK(gradients.end_ns(fewer) <= limit);
        CHECK(fewer.size() <= better.size());
    }
}

void small_rounds_are_optimal() {
    Random random(5);
    for (int trial = 0; trial < 60; ++trial) {
        const Gradients gradients(random_round(random, uniform(random, 1, 3), 2),
                                  random_curve(random));
        const Messages found = plan_overlap(gradients, {}, {0, 10'000, 12});
        CHECK(complete(gradients, found));
        CHECK(gradients.end_ns(found) == best_of_all(gradients));
    }
}

void cuts_lie_where_they_should() {
    Random random(6);
    for (int trial = 0; trial < 300; ++trial) {
        const Gradients gradients(random_round(random, 4, 20), random_curve(random));
        const auto tensor = static_cast<std::int32_t>(uniform(random, 0, 3));
        const std::int64_t elements = gradients.elements(tensor);
        const syncline::Cut from = gradients.cut(tensor, uniform(random, 0, elements - 1));
        const syncline::Cut to = gradients.cut(tensor, elements);
        const std::int64_t limit = uniform(random, 0, 100);
        const auto takes = [&](syncline::Cut a, syncline::Cut b) {
            return gradients.transmission_ns(gradients.bytes(b) - gradients.bytes(a));
        };
        const syncline::Cut far = gradients.furthest(from, to, limit);
        CHECK(from <= far && far <= to && takes(from, far) <= limit);
        const syncline::Cut near = gradients.nearest(from, to, limit);
        CHECK(from <= near && near <= to && takes(near, to) <= limit);
        const syncline::Cut inside = gradients.inside({}, gradients.last_cut(), 0.3);
        CHECK(inside < gradients.last_cut());
        const std::int64_t element = uniform(random, 0, gradients.all_elements());
        CHECK(gradients.element(gradients.cut_at(element)) == element);
    }
}

void what_is_no_round_is_refused() {
    const CostCurve curve({{0, 1.0, 1.0}});
    const auto gradients = [&](Round round) { return Gradients(round, curve); };
    CHECK(!refused([&] { gradients({{1, 2}, {1, 1}, {4, 4}, {0, 0}, 1}); }));
    CHECK(refused([&] { gradients({{}, {}, {}, {}, 1}); }));
    CHECK(refused([&] { gradients({{1, 2}, {1}, {4, 4}, {0, 0}, 1}); }));
    CHECK(refused([&] { gradients({{2, 1}, {1, 1}, {4, 4}, {0, 0}, 1}); }));
    CHECK(refused([&] { gradients({{1, 2}, {0, 1}, {4, 4}, {0, 0}, 1}); }));
    CHECK(refused([&] { gradients({{1, 2}, {1, 1}, {4, 4}, {0, -1}, 1}); }));
    CHECK(refused([&] { gradients({{1, 2}, {1, 1}, {4, 4}, {0, 0}, 3}); }));
    CHECK(refused([&] { gradients({{1, 4 * longest_ns}, {1, 1}, {4, 4}, {0, 0}, 1}); }));
    const std::int64_t huge = std::numeric_limits<std::int64_t>::max() / 2;
    CHECK(refused([&] { gradients({{1, 2}, {huge, huge}, {4, 4}, {0, 0}, 1}); }));
    CHECK(refused([&] {
        const Gradients fine = gradients({{1}, {20}, {4}, {0}, 1});
        (void)rearrange(fine, all_atoms(fine), {}, {}, 100);
    }));
}

void the_largest_values_stay_in_range() {
    const CostCurve curve({{0, static_cast<double>(longest_ns) / 4, 1e-9}});
    Round round;
    for (int i = 0; i < 20; ++i) {
        round.ready_ns.push_back(longest_ns);
        round.elements.push_back(std::int64_t{1} << 50);
        round.element_bytes.push_back(16);
        round.tail_ns.push_back(longest_ns - i);
    }
    for (const std::int32_t in_flight : {1, 2}) {
        round.in_flight = in_flight;
        const Gradients gradients(round, curve);
        const Messages found = plan_overlap(gradients, {}, {0, 100'000, 12});
        CHECK(complete(gradients, found));
        CHECK(gradients.end_ns(found) > longest_ns);
    }
}

void many_threads_agree() {
    Random random(7);
    const Gradients gradients(random_round(random, 30, 500), random_curve(random));
    const syncline::OverlapSearch search{0, 200'000, 12};
    const std::int64_t expected = gradients.end_ns(plan_overlap(gradients, {}, search));
    std::vector<int> equal(4, 0);
    {
        std::vector<std::jthread> threads;
        for (int& same : equal) {
            threads.emplace_back([&] {
                same = gradients.end_ns(plan_overlap(gradients, {}, search)) == expected ? 1 : 0;
            });
        }
    }
    CHECK(std::ranges::count(equal, 1) == 4);
}

void decoupled_plans_are_no_worse_than_their_seeds() {
    Random random(7);
    for (int trial = 0; trial < 60; ++trial) {
        const std::int64_t tensors = uniform(random, 1, trial % 2 == 0 ? 9 : 60);
        syncline::DecoupledRound round{{}, {}, {}, {}, random_curve(random), 0, 0, 1};
        std::int64_t ready = 0;
        for (std::int64_t i = 0; i < tensors; ++i) {
            ready += uniform(random, 0, 30);
            round.ready_ns.push_back(ready);
            round.size_bytes.push_back(uniform(random, 1, 500));
            round.tail_ns.push_back(uniform(random, 0, 300));
            round.need.push_back(tensors - i);
        }
        round.gap_ns = uniform(random, 0, 5);
        round.norm_ns = uniform(random, 0, 50);
        round.in_flight = static_cast<std::int32_t>(uniform(random, 1, 2));
        round.gathers_last = trial % 3 == 0;
        const std::vector<std::int32_t> one{static_cast<std::int32_t>(tensors) - 1};
        const std::int64_t seed_end =
            syncline::decoupled_end(round, one, {{0, 0, false}, {0, 0, true}});
        const syncline::DecoupledPlan plan = syncline::plan_decoupled(round, {one}, 3000);
        CHECK(plan.end_ns <= seed_end);
        // It throws where a gather goes before the last sum that must not.
        CHECK(plan.end_ns == syncline::decoupled_end(round, plan.lasts, plan.order));
    }
}

}  // namespace

int main() {
    decoupled_plans_are_no_worse_than_their_seeds();
    an_outlook_tells_what_sending_does();
    cuts_lie_where_they_should();
    rearranging_is_exact();
    dispatching_sends_everything();
    improving_never_makes_worse();
    small_rounds_are_optimal();
    what_is_no_round_is_refused();
    the_largest_values_stay_in_range();
    many_threads_agree();
    std::printf("overlap: %s\n", failed == 0 ? "passed" : "FAILED");
    return failed == 0 ? 0 : 1;
}
