// Tests of elements, programs, shared links and groups, for the sanitizers: ranks are threads.
//
// `syncline_group_tests [seconds]` says how long the soak at the end takes; 10 by default.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "doorbell.hpp"
#include "element.hpp"
#include "stores.hpp"
#include "team.hpp"

namespace {

using syncline::Forked;

// ---------------------------------------------------------------------- elements, one by one

constexpr Dtype dtypes[] = {Dtype::float32, Dtype::float64, Dtype::bfloat16,
                            Dtype::float16, Dtype::int8,    Dtype::int32,
                            Dtype::int64,   Dtype::uint8,   Dtype::boolean};
constexpr Reduction reductions[] = {Reduction::sum,     Reduction::average, Reduction::minimum,
                                    Reduction::maximum, Reduction::product, Reduction::band,
                                    Reduction::bor,     Reduction::bxor};

// A 16-bit format, from its definition.
struct Format {
    Dtype dtype;
    int fraction_bits;
    int least_exponent;          // of normal values
    std::vector<double> values;  // of the bits from 0 to infinity, which are in order

    Format(Dtype of, int bits, int least) : dtype(of), fraction_bits(bits), least_exponent(least) {
        const int infinity = ((1 << (15 - bits)) - 1) << bits;
        for (int i = 0; i <= infinity; ++i) {
            const int exponent = std::max(i >> bits, 1) + least - 1;
            const int fraction = (i & ((1 << bits) - 1)) + (i >> bits > 0 ? 1 << bits : 0);
            values.push_back(std::ldexp(fraction, exponent - bits));
        }
        values.back() = std::numeric_limits<double>::infinity();
    }

    [[nodiscard]] double widened(std::uint16_t bits) const {
        const std::size_t magnitude = bits & 0x7fffU;
        const double value = magnitude < values.size() ? values[magnitude]
                                                       : std::numeric_limits<double>::quiet_NaN();
        return (bits & 0x8000U) != 0 ? -value : value;
    }

    // To the nearest, of two as near to the even. A NaN gives some NaN.
    [[nodiscard]] std::uint16_t narrowed(double value) const {
        if (std::isnan(value)) return 0x7fffU;
        const unsigned sign = std::signbit(value) ? 0x8000U : 0;
        const double magnitude = std::abs(value);
        const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), least_exponent) : 0;
        const double unit = std::ldexp(1.0, exponent - fraction_bits);
        const double rounded =
            std::isinf(magnitude) ? magnitude : std::nearbyint(magnitude / unit) * unit;
        const auto at = std::ranges::lower_bound(values, rounded) - values.begin();
        return static_cast<std::uint16_t>(
            sign | std::min(static_cast<unsigned>(at), static_cast<unsigned>(values.size() - 1)));
    }

    [[nodiscard]] bool nan(std::uint16_t bits) const { return (bits & 0x7fffU) >= values.size(); }
};

float reduced(Reduction reduction, float a, float b) {
    switch (reduction) {
        case Reduction::minimum:
            if (std::isnan(a) || std::isnan(b)) return NAN;
            return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
        case Reduction::maximum:
            if (std::isnan(a) || std::isnan(b)) return NAN;
            return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
        case Reduction::product:
            return a * b;
        default:
            return a + b;
    }
}

// All 65,536 values beside some, in vectors and one by one.
void halves_are_rounded_to_the_nearest_even() {
    Random random(1);
    for (const Format& format :
         {Format(Dtype::bfloat16, 7, -126), Format(Dtype::float16, 10, -14)}) {
        std::vector<std::uint16_t> a(65536), b(65536), result(65536);
        for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::uint16_t>(i);
        const auto wrong = [&](std::uint16_t found, std::uint16_t expected) {
            return format.nan(expected) ? !format.nan(found) : found != expected;
        };
        for (int round = 0; round < 8; ++round) {
            const auto constant = static_cast<std::uint16_t>(random());
            for (std::size_t i = 0; i < b.size(); ++i) {
                // Nearby values meet half-way between two others; some are anything at all.
                const auto near = a[i] - (uniform(random, 0, 14) << format.fraction_bits);
                b[i] = static_cast<std::uint16_t>(round == 0   ? 0
                                                  : round == 1 ? constant
                                                  : round < 6  ? near
                                                               : static_cast<int>(random()));
            }
            for (const Reduction reduction :
                 {Reduction::sum, Reduction::minimum, Reduction::maximum, Reduction::product}) {
                combine(reduction, format.dtype, result.data(), a.data(), b.data(), a.size());
                int bad = 0;
                for (std::size_t i = 0; i < a.size(); ++i) {
                    const float of = reduced(reduction, static_cast<float>(format.widened(a[i])),
                                             static_cast<float>(format.widened(b[i])));
                    bad += wrong(result[i], format.narrowed(of)) ? 1 : 0;
                }
                CHECK(bad == 0);
                for (std::size_t i = 0; i < a.size(); i += 97) {
                    std::uint16_t one = 0;
                    std::uint16_t turned = 0;
                    combine(reduction, format.dtype, &one, &a[i], &b[i], 1);
                    combine(reduction, format.dtype, &turned, &b[i], &a[i], 1);
                    bad += format.nan(one) ? !format.nan(result[i]) : one != result[i];
                    bad += format.nan(turned) ? !format.nan(result[i]) : turned != result[i];
                }
                CHECK(bad == 0);
            }
        }
        for (const std::uint32_t divisor : {1U, 2U, 3U, 7U, 1000U}) {
            result = a;
            divide(format.dtype, result.data(), result.size(), divisor);
            int bad = 0;
            for (std::size_t i = 0; i < a.size(); ++i) {
                const float of =
                    static_cast<float>(format.widened(a[i])) / static_cast<float>(divisor);
                bad += wrong(result[i], format.narrowed(of)) ? 1 : 0;
            }
            CHECK(bad == 0);
        }
    }
}

template <typename T>
T scalar(Reduction reduction, T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        const auto x = static_cast<std::uint64_t>(a);
        const auto y = static_cast<std::uint64_t>(b);
        switch (reduction) {
            case Reduction::minimum:
                return std::min(a, b);
            case Reduction::maximum:
                return std::max(a, b);
            case Reduction::product:
                return static_cast<T>(x * y);
            case Reduction::band:
                return static_cast<T>(x & y);
            case Reduction::bor:
                return static_cast<T>(x | y);
            case Reduction::bxor:
                return static_cast<T>(x ^ y);
            default:
                return static_cast<T>(x + y);
        }
    } else {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
        switch (reduction) {
            case Reduction::minimum:
                return a == b ? (std::signbit(a) ? a : b) : std::min(a, b);
            case Reduction::maximum:
                return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
            case Reduction::product:
                return a * b;
            default:
                return a + b;
        }
    }
}

template <typename T>
void compare_with_scalars(Dtype dtype) {
    Random random(2);
    std::vector<T> extremes = {T(0), T(1), std::numeric_limits<T>::max(),
                               std::numeric_limits<T>::lowest()};
    if constexpr (std::is_floating_point_v<T>) {
        for (const T value :
             {T(-0.0), std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity(),
              std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::denorm_min()}) {
            extremes.push_back(value);
        }
    } else {
        extremes.push_back(static_cast<T>(-1));
    }
    const auto any = [&]() -> T {
        if (uniform(random, 0, 3) == 0) return extremes[random() % extremes.size()];
        if constexpr (std::is_floating_point_v<T>) {
            return static_cast<T>(std::normal_distribution<double>(0, 100)(random));
        } else {
            return static_cast<T>(random());
        }
    };
    for (const Reduction reduction : reductions) {
        CHECK(syncline::exists(reduction, dtype) ==
              (std::is_floating_point_v<T>
                   ? reduction <= Reduction::product
                   : dtype != Dtype::boolean || reduction != Reduction::average));
        if (!syncline::exists(reduction, dtype)) continue;
        for (const std::size_t count : {0, 1, 2, 7, 8, 31, 64, 1001}) {
            std::vector<T> a(count), b(count), result(count), expected(count);
            std::ranges::generate(a, any);
            std::ranges::generate(b, any);
            for (std::size_t i = 0; i < count; ++i) expected[i] = scalar(reduction, a[i], b[i]);
            const auto agrees = [&](const std::vector<T>& found) {
                for (std::size_t i = 0; i < count; ++i) {
                    const bool nan = expected[i] != expected[i];
                    if (nan ? found[i] == found[i]
                            : std::memcmp(&found[i], &expected[i], sizeof(T)) != 0) {
                        return false;
                    }
                }
                return true;
            };
            combine(reduction, dtype, result.data(), a.data(), b.data(), count);
            CHECK(agrees(result));
            combine(reduction, dtype, result.data(), b.data(), a.data(), count);
            CHECK(agrees(result));
            combine(reduction, dtype, a.data(), a.data(), b.data(), count);
            CHECK(agrees(a));
        }
    }
}

void elements_agree_with_scalars() {
    compare_with_scalars<float>(Dtype::float32);
    compare_with_scalars<double>(Dtype::float64);
    compare_with_scalars<std::int8_t>(Dtype::int8);
    compare_with_scalars<std::int32_t>(Dtype::int32);
    compare_with_scalars<std::int64_t>(Dtype::int64);
    compare_with_scalars<std::uint8_t>(Dtype::uint8);
    // Of two booleans, all four pairs.
    const std::array<std::uint8_t, 4> a = {0, 0, 1, 1}, b = {0, 1, 0, 1};
    const auto table = [&](Reduction reduction) {
        std::array<std::uint8_t, 4> result{};
        combine(reduction, Dtype::boolean, result.data(), a.data(), b.data(), 4);
        return result;
    };
    for (const Reduction any : {Reduction::sum, Reduction::maximum, Reduction::bor}) {
        CHECK(table(any) == std::array<std::uint8_t, 4>{0, 1, 1, 1});
    }
    for (const Reduction all : {Reduction::product, Reduction::minimum, Reduction::band}) {
        CHECK(table(all) == std::array<std::uint8_t, 4>{0, 0, 0, 1});
    }
    CHECK(table(Reduction::bxor) == std::array<std::uint8_t, 4>{0, 1, 1, 0});
    for (const Dtype dtype : dtypes) {
        CHECK(std::string(syncline::name_of(dtype)) != "an unknown dtype");
        CHECK(syncline::size_of(dtype) > 0);
    }
}

// A hop of a ring is its product, its sum and its rounding, one after the other.
void a_hop_is_rounded_once() {
    Random random(2);
    const Format format(Dtype::bfloat16, 7, -126);
    for (const std::size_t count : {0, 1, 7, 512, 2049}) {
        std::vector<float> values(count), sums(count);
        std::vector<std::uint16_t> arrived(count), sent(count);
        for (std::size_t i = 0; i < count; ++i) {
            values[i] = static_cast<float>(uniform(random, -1000, 1000)) / 7.0F;
            arrived[i] = format.narrowed(static_cast<float>(uniform(random, -1000, 1000)) / 3.0F);
        }
        sums = values;
        syncline::add_scaled(Dtype::float32, sums.data(), values.data(), count, 0.3F, false);
        syncline::scaled(values.data(), sent.data(), count, 0.3F);
        for (std::size_t i = 0; i < count; ++i) {
            const float product = values[i] * 0.3F;
            CHECK(sums[i] == product + values[i] && sent[i] == format.narrowed(product));
        }
        for (const bool last : {false, true}) {
            sums = values;
            sent = arrived;
            syncline::add_scaled(Dtype::bfloat16, sums.data(), sent.data(), count, 0.3F, last);
            for (std::size_t i = 0; i < count; ++i) {
                const float product = values[i] * 0.3F;
                const std::uint16_t sum =
                    format.narrowed(product + static_cast<float>(format.widened(arrived[i])));
                const auto kept = last ? static_cast<float>(format.widened(sum)) : values[i];
                CHECK(sent[i] == sum && sums[i] == kept);
            }
        }
    }
    bool refused = false;
    try {
        syncline::add_scaled(Dtype::int32, nullptr, nullptr, 0, 1.0F, false);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

// ---------------------------------------------------------------------- past the caches

void what_goes_past_the_caches_is_the_same() {
    Random random(3);
    std::vector<std::byte> from(20'000), to(from.size()), expected(from.size());
    for (std::byte& each : from) each = static_cast<std::byte>(random());
    for (int round = 0; round < 2000; ++round) {
        std::ranges::fill(to, std::byte{7});
        std::ranges::fill(expected, std::byte{7});
        const auto source = uniform<std::size_t>(random, 0, 200);
        const auto target = uniform<std::size_t>(random, 0, 200);
        const auto bytes = uniform<std::size_t>(random, 0, round % 4 == 0 ? 19'000 : 300);
        syncline::copy_past_caches(to.data() + target, from.data() + source, bytes);
        std::memcpy(expected.data() + target, from.data() + source, bytes);
        CHECK(to == expected);
    }
}

void the_faster_stores_are_found() {
    syncline::Stores stores(2);
    // How many of the next pieces go past the caches, where writing takes so long.
    const auto past = [&](int pieces, double cached_s, double past_s) {
        int found = 0;
        for (int i = 0; i < pieces; ++i) {
            const bool way = stores.next();
            found += way ? 1 : 0;
            stores.learn(way, way ? past_s : cached_s);
        }
        return found;
    };
    CHECK(past(1000, 1, 1) < 20);
    CHECK(past(4000, 1.5, 1) < 20);  // not worth it
    (void)past(4000, 7, 1);          // another state of the machine
    CHECK(past(1000, 7, 1) > 980);
    (void)past(4000, 1, 1);
    CHECK(past(1000, 1, 1) < 20);
    int pieces = 0;
    stores.write(syncline::Stores::least_bytes - 1, [&](bool way) { pieces += way ? 100 : 1; });
    CHECK(pieces == 1);
}

// ---------------------------------------------------------------------- programs

void programs_are_checked() {
    const auto program = [](std::vector<Step> steps, std::int32_t rank = 0) {
        return Program(rank, 3, 2, steps);
    };
    CHECK(refused([&] { (void)program({}, 3); }));
    CHECK(refused([&] { (void)Program(0, 1, 0, {}); }));
    CHECK(refused([&] { (void)program({{0, Action::send, 0, 0, 1}}); }));
    CHECK(refused([&] { (void)program({{0, Action::send, 3, 0, 1}}); }));
    CHECK(refused([&] { (void)program({{0, Action::copy, 1, 1, 1}}); }));
    CHECK(refused([&] { (void)program({{0, Action::copy, 1, 0, 3}}); }));
    CHECK(
        refused([&] { (void)program({{1, Action::send, 1, 0, 1}, {0, Action::send, 1, 0, 1}}); }));
    CHECK(
        refused([&] { (void)program({{0, Action::copy, 1, 0, 1}, {0, Action::send, 1, 1, 2}}); }));
    const Program mixed = program({{0, Action::copy, 1, 0, 1}, {1, Action::send, 2, 0, 2}});
    CHECK(!mixed.out_of_place());
    CHECK(mixed.changes(0) && !mixed.changes(1));
    const Program fresh = program({{0, Action::send, 1, 0, 2}, {0, Action::reduce, 1, 0, 2}});
    CHECK(fresh.out_of_place());
    CHECK(fresh.transfers()[0].exchanged && fresh.transfers()[1].after_sends.size() == 1);
}

void sends_of_the_same_are_known() {
    // Block 0 goes to both peers before and after it changes, block 1 only once.
    const Program program(0, 3, 2,
                          std::vector<Step>{{0, Action::send, 1, 0, 1},
                                            {0, Action::send, 2, 0, 1},
                                            {0, Action::reduce, 1, 0, 1},
                                            {1, Action::send, 1, 0, 1},
                                            {1, Action::send, 1, 1, 2},
                                            {2, Action::send, 2, 0, 1}});
    const auto& transfers = program.transfers();
    CHECK(transfers[0].copy_of == 0 && transfers[1].copy_of == 0);
    CHECK(!transfers[2].copy_of && !transfers[4].copy_of);
    CHECK(transfers[3].copy_of == 3 && transfers[5].copy_of == 3);
}

void a_slot_is_shared_until_all_have_taken_it() {
    using Content = syncline::Slots::Content;
    syncline::Slots slots(2);
    const Content first{1, 0, 0};
    CHECK(!slots.share(first));
    const std::uint32_t slot = slots.take(first);
    CHECK(slots.share(first) == slot);
    CHECK(!slots.share({1, 0, 4096}) && !slots.share({1, 1, 0}) && !slots.share({2, 0, 0}));
    const std::uint32_t other = slots.take(std::nullopt);
    CHECK(other != slot);
    slots.release(slot);
    CHECK(slots.share(first) == slot);  // one still reads it
    slots.release(slot);
    slots.release(slot);
    CHECK(!slots.share(first));
    CHECK(slots.take({{3, 0, 0}}) == slot);
}

// ---------------------------------------------------------------------- ranks as threads

// What rank r puts in: whole numbers, whose sums are exact in any order.
template <typename T>
T given(std::int32_t rank, std::size_t index, std::size_t salt = 0) {
    return static_cast<T>((static_cast<std::size_t>(rank) * 31 + index * 7 + salt * 13) % 1009);
}

template <typename T>
bool correct(const Shape& shape, std::int32_t rank, std::int32_t ranks, std::span<const T> result,
             std::size_t salt = 0) {
    if (shape.root >= 0 && shape.root != rank) return true;
    std::int32_t source = -1;
    if (shape.collective == broadcast) {
        source = shape.name == "pipelined broadcast" ? ranks - 1 : 0;
    }
    for (std::size_t i = 0; i < result.size(); ++i) {
        T expected{};
        for (std::int32_t peer = 0; peer < ranks; ++peer) {
            if (source < 0 || peer == source) expected += given<T>(peer, i, salt);
        }
        if (result[i] != expected) return false;
    }
    return true;
}

// The ways in which a collective can be started.
struct Way {
    bool in_place;
    bool blocking;
};

constexpr Way ways[] = {{true, true}, {true, false}, {false, true}, {false, false}};

template <typename T>
void run_once(Team& team, const Shape& shape, std::size_t count, const Way& way) {
    const std::int32_t ranks = team.ranks();
    team.run([&](std::int32_t rank) {
        std::vector<T> memory(2 * count);
        const std::span<T> all(memory);
        const std::span<T> input = all.first(count);
        for (std::size_t i = 0; i < count; ++i) input[i] = given<T>(rank, i);
        Operation::Request asked = request<T>(shape, rank, ranks, input, input);
        const bool elsewhere = !way.in_place && asked.program->out_of_place();
        const std::span<T> work = elsewhere ? all.last(count) : input;
        if (elsewhere) {
            // What the program leaves alone stays where it was put in.
            std::ranges::copy(input, work.begin());
            asked.work = reinterpret_cast<std::byte*>(work.data());
        }
        const Handle handle = team.at(rank).start(std::move(asked), way.blocking);
        team.at(rank).wait(handle, soon());
        if (!correct<T>(shape, rank, ranks, work)) {
            std::fprintf(stderr, "%s, %d ranks, %zu elements, rank %d%s%s\n", shape.name.c_str(),
                         ranks, count, rank, way.in_place ? ", in place" : "",
                         way.blocking ? ", blocking" : "");
            ++failed;
        }
        for (std::size_t i = 0; elsewhere && i < count; ++i) CHECK(input[i] == given<T>(rank, i));
        CHECK(handle->done());
    });
    for (std::int32_t rank = 0; rank < ranks; ++rank) CHECK(team.at(rank).idle());
}

// With fragments of 4 KiB and two of them under way, 20,000 elements are far above the window.
// 68 floats lie beside what is said of them, 69 in a slot.
void every_shape_gives_the_right_result() {
    for (const std::int32_t ranks : {1, 2, 3, 4, 5}) {
        Team team(ranks);
        for (const Shape& shape : shapes(ranks)) {
            if (ranks == 1 && !shape.flows.empty()) continue;
            for (const std::size_t count : {0, 1, 2, 5, 17, 68, 69, 1023, 1024, 20'001}) {
                for (const Way& way : ways) {
                    // Large ones in two ways out of four: each takes a thread a rank.
                    if (count > 1024 && way.blocking != way.in_place) continue;
                    run_once<float>(team, shape, count, way);
                }
            }
            run_once<std::int64_t>(team, shape, 3001, ways[0]);
        }
    }
}

// Pieces so large that some are written past the caches, and lie at any alignment.
void large_fragments_give_the_right_result() {
    Team team(3, 16'384, 4);
    for (const Shape& shape : shapes(3)) {
        for (const std::size_t count : {4099, 100'003}) {
            for (const Way& way : ways) run_once<float>(team, shape, count, way);
        }
    }
}

// Where transfers cover the part [start, stop) in part, it is copied to the output at the end.
void averages_are_divided_and_results_go_where_they_should(std::size_t start, std::size_t stop) {
    Team team(3);
    const Shape shape = direct(3);
    team.run([&](std::int32_t rank) {
        std::vector<float> work(99), output(stop - start, -1.0F);
        for (std::size_t i = 0; i < work.size(); ++i) {
            work[i] = 3.0F * given<float>(rank, i);
        }
        Operation::Request asked = request<float>(shape, rank, 3, work, std::span<float>(work));
        asked.call.reduction = Reduction::average;
        asked.result_start = start;
        asked.result_stop = stop;
        asked.output = reinterpret_cast<std::byte*>(output.data());
        Group& group = team.at(rank);
        group.wait(group.start(std::move(asked), true), soon());
        for (std::size_t i = 0; i < output.size(); ++i) {
            float sum = 0;
            for (std::int32_t peer = 0; peer < 3; ++peer) sum += given<float>(peer, i + start);
            CHECK(output[i] == sum);
        }
    });
}

// Some threads of a rank wait for collectives that another has started, in any order.
void several_are_in_flight_from_several_threads() {
    for (const bool blocking : {false, true}) {
        for (const auto spin : {std::chrono::nanoseconds(0), std::chrono::nanoseconds(20'000)}) {
            Team team(3, 4096, 2, spin);
            const std::vector<Shape> all = shapes(3);
            constexpr std::size_t flight = 12;
            for (int round = 0; round < 4; ++round) {
                team.run([&](std::int32_t rank) {
                    Group& group = team.at(rank);
                    std::vector<std::vector<float>> work;
                    std::vector<Handle> handles;
                    for (std::size_t n = 0; n < flight; ++n) {
                        const std::size_t count = n * n * 60;
                        std::vector<float>& buffer = work.emplace_back(count);
                        for (std::size_t i = 0; i < count; ++i) {
                            buffer[i] = given<float>(rank, i, n);
                        }
                        handles.push_back(
                            group.start(request<float>(all[n % all.size()], rank, 3, buffer,
                                                       std::span<float>(buffer)),
                                        blocking));
                    }
                    std::vector<std::jthread> waiting;
                    for (std::size_t thread = 0; thread < 3; ++thread) {
                        waiting.emplace_back([&, thread] {
                            for (std::size_t n = 0; n < flight; ++n) {
                                const std::size_t which = thread % 2 == 0 ? n : flight - 1 - n;
                                if (which % 3 != thread) continue;
                                group.wait(handles[which], soon());
                                CHECK(correct<float>(all[which % all.size()], rank, 3, work[which],
                                                     which));
                            }
                        });
                    }
                });
            }
        }
    }
}

// ---------------------------------------------------------------------- what goes wrong

void ranks_that_call_different_collectives_say_so() {
    const auto differing = [](const std::function<void(Operation::Request&)>& change) {
        Team team(3);
        std::array<Outcome, 3> ends;
        std::vector<std::vector<float>> work(3, std::vector<float>(100));
        team.run([&](std::int32_t rank) {
            const auto own = static_cast<std::size_t>(rank);
            Group& group = team.at(rank);
            Operation::Request asked =
                request<float>(direct(3), rank, 3, work[own], std::span<float>(work[own]));
            if (rank == 1) change(asked);
            ends[own] = outcome([&] { group.wait(group.start(asked, true), soon()); });
        });
        for (const Outcome& end : ends) CHECK(end.disagrees);
        return std::ranges::any_of(ends, [](const Outcome& end) {
            return end.what.find("this rank") != std::string::npos;
        });
    };
    CHECK(differing([](Operation::Request& r) { r.call.count = 99; }));
    CHECK(differing([](Operation::Request& r) { r.call.dtype = Dtype::int32; }));
    CHECK(differing([](Operation::Request& r) { r.call.reduction = Reduction::maximum; }));
    CHECK(differing([](Operation::Request& r) { r.call.collective = broadcast; }));
    CHECK(differing([](Operation::Request& r) { r.call.variant = 1; }));
}

void a_lost_peer_fails_who_misses_it() {
    Team team(3);
    std::array<Outcome, 3> ends;
    std::vector<std::vector<float>> work(3, std::vector<float>(10'000));
    const auto all = [&](std::int32_t rank) {
        const auto own = static_cast<std::size_t>(rank);
        Group& group = team.at(rank);
        ends[own] = outcome([&] {
            group.wait(group.start(request<float>(direct(3), rank, 3, work[own],
                                                  std::span<float>(work[own])),
                                   rank == 0),
                       soon());
        });
    };
    team.run([&](std::int32_t rank) {
        if (rank == 2) {
            std::this_thread::sleep_for(milliseconds(20));
            team.at(0).lose(2, "it is gone");
            team.at(1).lose(2, "it is gone");
        } else {
            all(rank);
        }
    });
    CHECK(says(ends[0], "it is gone"));
    // Rank 1 may learn of it from rank 0 first.
    CHECK(says(ends[1], "it is gone") || says(ends[1], "rank 0 has given up"));
    for (const std::size_t rank : {0U, 1U}) {
        CHECK(ends[rank].rank == 2);
        CHECK(team.groups[rank]->failed());
    }
    // And whatever is started afterwards.
    all(0);
    CHECK(ends[0].rank == 2);
}

// In recursive doubling over four ranks, 0 and 3 have nothing to do with each other.
void who_waits_for_a_survivor_learns_whom_it_lost() {
    Team team(4);
    std::array<Outcome, 4> ends;
    std::vector<std::vector<float>> work(4, std::vector<float>(10));
    team.run([&](std::int32_t rank) {
        if (rank == 3) return;
        const auto own = static_cast<std::size_t>(rank);
        Group& group = team.at(rank);
        const Handle handle = group.start(
            request<float>(recursive_doubling(4), rank, 4, work[own], std::span<float>(work[own])),
            true);
        if (rank != 0) group.lose(3, "rank 3 is gone");
        ends[own] = outcome([&] { group.wait(handle, soon()); });
    });
    for (const std::size_t rank : {0U, 1U, 2U}) {
        CHECK(ends[rank].rank == 3 && says(ends[rank], "rank 3"));
    }
}

// Also if it could not be told at once, and the survivor's program does nothing more.
void who_comes_later_learns_whom_a_survivor_lost() {
    Team team(3);
    std::vector<std::vector<float>> work(3, std::vector<float>(std::size_t{1} << 22));
    const Shape shape{"in a row", reduce, 2, {{0, 1, 2, 0, 1, false}, {0, 0, 1, 1, 2, false}}};
    const auto start = [&](std::int32_t rank) {
        auto& own = work[static_cast<std::size_t>(rank)];
        return team.at(rank).start(request<float>(shape, rank, 3, own, std::span<float>(own)),
                                   false);
    };
    (void)start(1);
    team.at(1).lose(0, "it is gone");
    const Outcome end = outcome([&] { team.at(2).wait(start(2), soon()); });
    CHECK(team.at(1).failed() && end.rank == 0 && says(end, "rank 0"));
}

// What a peer has sent before it left still counts.
void a_peer_may_leave_once_it_has_sent_all() {
    Team team(2);
    std::vector<std::vector<float>> work(2, std::vector<float>(100, 1.0F));
    const Shape shape = recursive_doubling(2);
    const auto start = [&](std::int32_t rank) {
        auto& own = work[static_cast<std::size_t>(rank)];
        return team.at(rank).start(request<float>(shape, rank, 2, own, std::span<float>(own)),
                                   true);
    };
    const Handle first = start(0);
    const Handle second = start(1);
    std::jthread other([&] { team.at(0).wait(first, soon()); });
    team.at(1).wait(second, soon());
    other.join();
    const Handle waited = start(0);
    std::jthread last([&] { team.at(1).wait(start(1), soon()); });
    while (!waited->done() && !team.at(0).failed()) {
        team.at(0).lose(1, "it has left");
        if (outcome([&] { team.at(0).wait(waited, soon()); }).rank == 1) break;
    }
    last.join();
    // Whether it was lost before it came or after: no crash, and the result is all or nothing.
    CHECK(waited->done() ? work[0][99] == 4.0F : team.at(0).failed());
}

// Also where its turn comes only after a rank that is late.
void a_peer_may_leave_before_its_turn_comes() {
    Team team(3);
    std::vector<std::vector<float>> work(3, std::vector<float>(2000, 1.0F));
    const Shape shape{"in turn", reduce, 1, {{0, 1, 0, 0, 1, true}, {1, 2, 0, 0, 1, true}}, 0};
    const auto start = [&](std::int32_t rank) {
        auto& own = work[static_cast<std::size_t>(rank)];
        return team.at(rank).start(request<float>(shape, rank, 3, own, std::span<float>(own)),
                                   rank != 0);
    };
    const Handle waited = start(0);
    team.at(2).wait(start(2), soon());
    team.at(0).lose(2, "it has left");
    std::this_thread::sleep_for(milliseconds(20));
    CHECK(!team.at(0).failed());
    team.at(1).wait(start(1), soon());
    team.at(0).wait(waited, soon());
    CHECK(work[0][1999] == 3.0F);
}

void a_wait_ends_at_its_deadline() {
    Team team(2);
    std::vector<float> work(10);
    Group& group = team.at(0);
    const auto begin = [&] {
        return group.start(request<float>(direct(2), 0, 2, work, std::span<float>(work)), true);
    };
    const Handle handle = begin();
    const Outcome end = outcome([&] { group.wait(handle, Clock::now() + milliseconds(30)); });
    CHECK(end.rank == -3 && says(end, "rank 0 waited in vain in all-reduce number 1 of 10") &&
          says(end, "rank 1 did not"));
    CHECK(outcome(begin).rank == 1);
    // The other learns of it when it comes.
    std::vector<float> theirs(10);
    const Outcome late = outcome([&] {
        const Handle other = team.at(1).start(
            request<float>(direct(2), 1, 2, theirs, std::span<float>(theirs)), true);
        team.at(1).wait(other, soon());
    });
    CHECK(late.rank == 1 || late.rank == -2);
}

// What a collective waits for may have come, and be behind what an earlier one waits for.
void a_wait_names_whom_an_earlier_collective_misses() {
    Team team(3);
    const Shape both{"both", syncline::exchange, 1, {{0, 2, 0, 0, 1, true}, {1, 1, 0, 0, 1, true}}};
    const Shape one{"one", syncline::exchange, 1, {{0, 1, 0, 0, 1, false}}};
    std::vector<std::vector<float>> work(4, std::vector<float>(10));
    const auto begin = [&](std::int32_t rank, const Shape& shape, std::vector<float>& memory) {
        return team.at(rank).start(request<float>(shape, rank, 3, memory, std::span<float>(memory)),
                                   false);
    };
    (void)begin(1, both, work[0]);
    (void)begin(1, one, work[1]);
    (void)begin(0, both, work[2]);
    const Handle last = begin(0, one, work[3]);
    const Outcome end = outcome([&] { team.at(0).wait(last, Clock::now() + milliseconds(100)); });
    CHECK(end.rank == -3 &&
          says(end, "rank 2 did not send, or take, what it should within the timeout in ") &&
          says(end, ", which comes before"));
}

// A wait that does not give up leaves the collective under way, whoever drives it afterwards.
void a_wait_may_be_repeated() {
    for (const bool blocking : {true, false}) {
        Team team(2);
        std::vector<std::vector<float>> work(2, std::vector<float>(20'000, 1.0F));
        const auto start = [&](std::int32_t rank) {
            auto& own = work[static_cast<std::size_t>(rank)];
            return team.at(rank).start(
                request<float>(direct(2), rank, 2, own, std::span<float>(own)), blocking);
        };
        const Handle handle = start(0);
        const auto wait = [&](Clock::time_point deadline) {
            return outcome([&] { team.at(0).wait(handle, deadline, false); });
        };
        for (int again = 0; again < 3; ++again) {
            const Outcome end = wait(Clock::now() + milliseconds(5));
            CHECK(end.rank == -3 && says(end, "rank 1 did not"));
        }
        CHECK(!handle->done() && !team.at(0).failed() && !team.at(0).idle());
        // The other needs this rank's part, which nobody waits for now.
        team.at(1).wait(start(1), soon());
        CHECK(wait(soon()).rank == -2);
        CHECK(work[0][19'999] == 2.0F && work[1][0] == 2.0F);
        CHECK(team.at(0).idle() && !team.at(1).failed());
    }
}

// A link whose own way fails, not its peer.
class FailingLink final : public syncline::Link {
  public:
    [[nodiscard]] std::size_t fragment_bytes() const override { return 4096; }
    [[nodiscard]] bool can_send() override { return sends; }
    void send(const std::byte*, std::size_t, const Call&, bool,
              const std::optional<syncline::Copies>&) override {
        throw std::bad_alloc();
    }
    [[nodiscard]] std::uint64_t released() override { return 0; }
    [[nodiscard]] bool can_receive() override { return false; }
    void receive(const syncline::Target&, const Call&) override {}
    [[nodiscard]] std::uint64_t received() override { return 0; }

    std::atomic<bool> sends = false;
};

// Sleeps until it is woken, and is slow to notice.
class SlowSleeper final : public syncline::Sleeper {
  public:
    void announce() override {}
    void withdraw() override {}
    void sleep(Clock::time_point) override {
        ++sleeping;
        while (!woken.exchange(false)) std::this_thread::sleep_for(milliseconds(1));
        std::this_thread::sleep_for(milliseconds(20));
        --sleeping;
    }
    void wake() override { woken = true; }

    std::atomic<int> sleeping = 0;
    std::atomic<bool> woken = false;
};

// Rank 0 of two, on a link and a sleeper of the tests.
struct Alone {
    FailingLink* link = nullptr;
    SlowSleeper* sleeper = nullptr;
    std::unique_ptr<Group> group;
    std::vector<float> work = std::vector<float>(10);

    Alone() {
        auto failing = std::make_unique<FailingLink>();
        auto slow = std::make_unique<SlowSleeper>();
        link = failing.get();
        sleeper = slow.get();
        std::vector<std::unique_ptr<syncline::Link>> links(2);
        links[1] = std::move(failing);
        group = std::make_unique<Group>(0, std::move(links), std::move(slow), nullptr,
                                        Group::Patience{});
    }
    [[nodiscard]] Handle start(bool blocking) {
        return group->start(request<float>(direct(2), 0, 2, work, std::span<float>(work)),
                            blocking);
    }
};

// Whichever thread it happens on: another one than a peer's failure must not leave the group half
// driven, for which others would wait for ever.
void an_error_while_driving_fails_the_group() {
    const auto fails = [](Alone& alone, const Handle& handle) {
        const Outcome end = outcome([&] { alone.group->wait(handle, soon()); });
        CHECK(end.rank == -1 && says(end, "rank 0 cannot go on: std::bad_alloc"));
        CHECK(alone.group->failed());
        CHECK(outcome([&] { (void)alone.start(true); }).rank == -1);
        alone.group->close();
    };
    for (const bool blocking : {true, false}) {
        Alone at_once;
        at_once.link->sends = true;
        fails(at_once, at_once.start(blocking));
        Alone later;
        const Handle handle = later.start(blocking);
        later.link->sends = true;
        later.group->lose(1, "it is gone");  // wakes who drives
        fails(later, handle);
    }
}

// What a sleeper sleeps on may be closed once the group is.
void closing_waits_for_who_sleeps() {
    for (const bool blocking : {true, false}) {
        Alone alone;
        const Handle handle = alone.start(blocking);
        Outcome end;
        std::jthread waiting([&] { end = outcome([&] { alone.group->wait(handle, soon()); }); });
        while (alone.sleeper->sleeping == 0) std::this_thread::yield();
        alone.group->close();
        CHECK(alone.sleeper->sleeping == 0);
        alone.sleeper->woken = false;
        alone.group->lose(1, "it is gone");
        CHECK(!alone.sleeper->woken);
        waiting.join();
        CHECK(end.rank == -1 && says(end, "the group was closed"));
    }
}

// A fork has the group's memory, and shares its files: it must neither use nor close them.
void a_fork_takes_no_part() {
    Team team(2);
    std::vector<std::vector<float>> work(2, std::vector<float>(100, 1.0F));
    const auto start = [&](std::int32_t rank, bool blocking) {
        auto& own = work[static_cast<std::size_t>(rank)];
        return team.at(rank).start(request<float>(direct(2), rank, 2, own, std::span<float>(own)),
                                   blocking);
    };
    const Handle begun = start(0, false);  // a thread drives it
    const pid_t child = fork();
    if (child == 0) {
        const auto refuses = [](auto&& call) {
            try {
                call();
            } catch (const Forked& error) {
                return std::string(error.what()).find("rank 0: a fork of its process") == 0;
            }
            return false;
        };
        Group& group = team.at(0);
        const bool inert = refuses([&] { (void)start(0, true); }) &&
                           refuses([&] { group.wait(begun, soon()); }) && group.failed() &&
                           group.idle() && group.forked();
        group.lose(1, "it is gone");
        group.close();
        _exit(inert ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    team.at(1).wait(start(1, true), soon());
    team.at(0).wait(begun, soon());
    CHECK(work[0][99] == 2.0F && !team.at(0).forked());
}

// A thread that sleeps for a peer must wake when another fails the group.
void a_failure_wakes_whoever_drives() {
    for (const bool blocking : {true, false}) {
        Team team(2, 4096, 2, std::chrono::nanoseconds(0));
        Group& group = team.at(0);
        std::vector<float> one(10), two(10);
        const Handle first =
            group.start(request<float>(direct(2), 0, 2, one, std::span<float>(one)), blocking);
        Outcome end;
        const auto began = Clock::now();
        std::jthread driving([&] { end = outcome([&] { group.wait(first, soon()); }); });
        std::this_thread::sleep_for(milliseconds(20));
        const Handle second =
            group.start(request<float>(direct(2), 0, 2, two, std::span<float>(two)), blocking);
        CHECK(outcome([&] { group.wait(second, Clock::now() + milliseconds(20)); }).rank != -2);
        driving.join();
        CHECK(end.rank != -2 && Clock::now() - began < seconds(30));
    }
}

// Every rank sends all others messages of every size with two tags, and takes them in an order of
// its own, with collectives between them.
void messages_go_by_their_tags_beside_collectives() {
    constexpr std::int32_t ranks = 3;
    constexpr std::uint32_t count = 12;
    const auto size = [](std::uint32_t number) { return std::size_t{number} * number * 60; };
    const auto value = [](std::int32_t from, std::uint32_t number) {
        return static_cast<float>(from * 100) + static_cast<float>(number);
    };
    for (const std::uint32_t seed : {1U, 2U, 3U}) {
        Team team(ranks);
        team.run([&](std::int32_t rank) {
            Group& group = team.at(rank);
            Random random(seed * 10 + static_cast<std::uint32_t>(rank));
            std::vector<std::vector<float>> memory;
            memory.reserve(4 * ranks * count);
            std::vector<syncline::MessageHandle> sent;
            for (std::uint32_t number = 0; number < count; ++number) {
                for (std::int32_t peer = 0; peer < ranks; ++peer) {
                    if (peer == rank) continue;
                    memory.emplace_back(size(number), value(rank, number));
                    sent.push_back(message(number % 2, peer, memory.back(), true));
                    group.send(sent.back());
                }
            }
            std::vector<float> one(2000, 1);
            const auto reduce = [&] {
                group.wait(group.start(
                               request<float>(ring(ranks), rank, ranks, one, std::span<float>(one)),
                               uniform(random, 0, 1) == 0),
                           soon());
            };
            reduce();
            // Of each peer and tag in order, otherwise in any.
            std::array<std::array<std::uint32_t, 2>, ranks> next{};
            for (auto& of_peer : next) of_peer = {0, 1};
            for (std::uint32_t left = 2 * count; left > 0;) {
                const auto peer = uniform<std::size_t>(random, 0, ranks - 1);
                const auto tag = uniform<std::size_t>(random, 0, 1);
                std::uint32_t& number = next[peer][tag];
                if (static_cast<std::int32_t>(peer) == rank || number >= count) continue;
                memory.emplace_back(size(number));
                const auto taken = message(static_cast<std::uint32_t>(tag),
                                           static_cast<std::int32_t>(peer), memory.back(), false);
                group.receive(taken);
                group.wait(taken, soon());
                CHECK(std::ranges::all_of(memory.back(), [&](float each) {
                    return each == value(static_cast<std::int32_t>(peer), number);
                }));
                number += 2;
                if (--left % 7 == 0) reduce();
            }
            for (const auto& each : sent) group.wait(each, soon());
            reduce();
            CHECK(group.idle());
        });
    }
}

void a_message_from_anyone_says_from_whom() {
    Team team(3);
    team.run([&](std::int32_t rank) {
        Group& group = team.at(rank);
        std::vector<float> own(1500, static_cast<float>(rank)), none;
        if (rank > 0) {
            group.wait(
                [&] {
                    const auto m = message(7, 0, own, true);
                    group.send(m);
                    return m;
                }(),
                soon());
            group.wait(
                [&] {
                    const auto m = message(8, 0, none, true);
                    group.send(m);
                    return m;
                }(),
                soon());
            return;
        }
        std::array<int, 3> seen{};
        for (const std::uint32_t tag : {8U, 7U, 7U, 8U}) {
            std::vector<float>& to = tag == 7 ? own : none;
            const auto taken = message(tag, syncline::any_rank, to, false);
            group.receive(taken);
            group.wait(taken, soon());
            CHECK(taken->peer() > 0);
            ++seen[static_cast<std::size_t>(taken->peer())];
            CHECK(tag == 8 || own.front() == static_cast<float>(taken->peer()));
        }
        CHECK(seen[1] == 2 && seen[2] == 2);
    });
}

void messages_that_differ_are_refused() {
    Team team(2);
    std::vector<float> four(4), five(5);
    team.at(0).send(message(1, 1, four, true));
    const Outcome differs = outcome([&] {
        const auto taken = message(1, 0, five, false);
        team.at(1).receive(taken);
        team.at(1).wait(taken, soon());
    });
    CHECK(differs.rank == 0);
}

void a_message_from_anyone_is_missing_once_all_others_are_gone() {
    Team team(3);
    Group& group = team.at(2);
    std::vector<float> any(4);
    const auto taken = message(1, syncline::any_rank, any, false);
    group.receive(taken);
    group.lose(0, "it is gone");
    const auto briefly = Clock::now() + milliseconds(100);
    CHECK(outcome([&] { group.wait(taken, briefly, false); }).rank == -3);
    CHECK(!group.failed());
    group.lose(1, "it is gone, too");
    CHECK(outcome([&] { group.wait(taken, soon()); }).rank == 0);
}

// A rank that was lost before is missed by what is started while another thread sleeps.
void a_start_notices_a_lost_peer_while_another_thread_sleeps() {
    Team team(3, 4096, 2, std::chrono::nanoseconds(0));
    Group& group = team.at(0);
    group.lose(2, "it is gone");
    std::vector<float> one(10), two(10);
    const Shape from_1{"pair", syncline::exchange, 1, {{0, 1, 0, 0, 1, false}}};
    const Handle first =
        group.start(request<float>(from_1, 0, 3, one, std::span<float>(one)), true);
    Outcome end;
    const auto began = Clock::now();
    std::jthread driving([&] { end = outcome([&] { group.wait(first, soon()); }); });
    std::this_thread::sleep_for(milliseconds(20));
    const Outcome second = outcome([&] {
        group.wait(group.start(request<float>(direct(3), 0, 3, two, std::span<float>(two)), true),
                   soon());
    });
    CHECK(second.rank == 2);
    driving.join();
    CHECK(end.rank == 2 && Clock::now() - began < seconds(30));
}

void closing_ends_all_waits() {
    for (const bool blocking : {true, false}) {
        Team team(2);
        Group& group = team.at(0);
        std::vector<std::vector<float>> work(4, std::vector<float>(50'000));
        std::vector<Handle> handles;
        for (auto& buffer : work) {
            handles.push_back(group.start(
                request<float>(ring(2), 0, 2, buffer, std::span<float>(buffer)), blocking));
        }
        std::vector<std::jthread> waiting;
        std::atomic<int> ended = 0;
        for (const Handle& handle : handles) {
            waiting.emplace_back([&, handle] {
                const Outcome end = outcome([&] { group.wait(handle, soon()); });
                CHECK(end.rank == -1 && says(end, "the group was closed"));
                ++ended;
            });
        }
        std::this_thread::sleep_for(milliseconds(10));
        group.close();
        waiting.clear();
        CHECK(ended == 4);
        work.clear();  // nobody touches it any more
        group.close();
    }
}

// Close one rank at a random moment while both work: the other fails or was done; nobody hangs.
void closing_races_with_work() {
    Random random(5);
    for (int round = 0; round < 40; ++round) {
        Team team(2);
        const int pause_us = uniform(random, 0, 2000);
        std::atomic<int> finished = 0;
        team.run([&](std::int32_t rank) {
            std::jthread closer;
            if (rank == 0) {
                closer = std::jthread([&] {
                    std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
                    team.at(0).close();
                    team.at(1).lose(0, "it has left");
                });
            }
            std::vector<float> work(5000);
            (void)outcome([&] {
                for (int n = 0; n < 1000; ++n) {
                    team.at(rank).wait(team.at(rank).start(request<float>(direct(2), rank, 2, work,
                                                                          std::span<float>(work)),
                                                           n % 2 == 0),
                                       soon());
                }
            });
            ++finished;
        });
        CHECK(finished == 2);
    }
}

// ---------------------------------------------------------------------- for a while

// Mixed collectives in several groups, several in flight, waited for in any order.
void soak(seconds duration) {
    const auto end = Clock::now() + duration;
    std::vector<std::unique_ptr<Team>> teams;
    for (const std::int32_t ranks : {4, 3, 2}) {
        teams.push_back(std::make_unique<Team>(
            ranks, 4096 * static_cast<std::size_t>(ranks - 1), 2,
            ranks == 3 ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(20'000)));
    }
    Random seeds(static_cast<std::uint64_t>(Clock::now().time_since_epoch().count()));
    std::uint64_t rounds = 0;
    do {
        const std::uint64_t seed = seeds();
        const int before = failed;
        std::vector<std::jthread> running;
        for (const auto& team : teams) {
            running.emplace_back([&team, seed] {
                const std::int32_t ranks = team->ranks();
                const std::vector<Shape> all = shapes(ranks);
                team->run([&](std::int32_t rank) {
                    Group& group = team->at(rank);
                    Random agreed(seed);  // the same on all ranks
                    Random own(seed + static_cast<std::uint64_t>(rank) + 1);
                    for (int batch = 0; batch < 20; ++batch) {
                        const auto flight = uniform<std::size_t>(agreed, 1, 5);
                        std::vector<std::vector<float>> work(flight);
                        std::vector<std::tuple<Handle, const Shape*, std::size_t>> begun;
                        for (std::size_t n = 0; n < flight; ++n) {
                            const Shape& shape = all[agreed() % all.size()];
                            const std::size_t count =
                                agreed() % 4 == 0 ? agreed() % 30'000 : agreed() % 300;
                            std::vector<float>& buffer = work[n];
                            buffer.resize(count);
                            for (std::size_t i = 0; i < count; ++i) {
                                buffer[i] = given<float>(rank, i, n);
                            }
                            begun.emplace_back(
                                group.start(request<float>(shape, rank, ranks, buffer,
                                                           std::span<float>(buffer)),
                                            own() % 2 == 0),
                                &shape, n);
                        }
                        std::ranges::shuffle(begun, own);
                        for (const auto& [handle, shape, n] : begun) {
                            group.wait(handle, soon());
                            CHECK(correct<float>(*shape, rank, ranks, work[n], n));
                        }
                    }
                });
            });
        }
        running.clear();
        ++rounds;
        if (failed != before) {
            std::fprintf(stderr, "soak: seed %llu\n", static_cast<unsigned long long>(seed));
            break;
        }
    } while (Clock::now() < end);
    std::printf("soak: %llu rounds\n", static_cast<unsigned long long>(rounds));
}

// What every kind of link has to do.
void over_any_link(seconds of_soak) {
    every_shape_gives_the_right_result();
    large_fragments_give_the_right_result();
    averages_are_divided_and_results_go_where_they_should(10, 50);
    averages_are_divided_and_results_go_where_they_should(33, 66);
    several_are_in_flight_from_several_threads();
    ranks_that_call_different_collectives_say_so();
    a_lost_peer_fails_who_misses_it();
    who_waits_for_a_survivor_learns_whom_it_lost();
    who_comes_later_learns_whom_a_survivor_lost();
    a_peer_may_leave_once_it_has_sent_all();
    a_peer_may_leave_before_its_turn_comes();
    a_wait_ends_at_its_deadline();
    a_wait_names_whom_an_earlier_collective_misses();
    a_wait_may_be_repeated();
    a_fork_takes_no_part();
    a_failure_wakes_whoever_drives();
    messages_go_by_their_tags_beside_collectives();
    a_message_from_anyone_says_from_whom();
    messages_that_differ_are_refused();
    a_message_from_anyone_is_missing_once_all_others_are_gone();
    a_start_notices_a_lost_peer_while_another_thread_sleeps();
    closing_ends_all_waits();
    closing_races_with_work();
    soak(of_soak);
}

}  // namespace

int main(int arguments, char** values) {
    const seconds of_soak(arguments > 1 ? std::atoi(values[1]) : 10);
    halves_are_rounded_to_the_nearest_even();
    a_hop_is_rounded_once();
    elements_agree_with_scalars();
    what_goes_past_the_caches_is_the_same();
    the_faster_stores_are_found();
    programs_are_checked();
    sends_of_the_same_are_known();
    a_slot_is_shared_until_all_have_taken_it();
    an_error_while_driving_fails_the_group();
    closing_waits_for_who_sleeps();
    over_any_link(of_soak / 2);
    over_tcp = true;
    over_any_link(of_soak / 2);
    if (failed > 0) return 1;
    std::puts("group tests passed");
    return 0;
}
