// Tests of selection, merging and the code of indices, for the sanitizers.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "element.hpp"
#include "index_code.hpp"
#include "int8.hpp"
#include "recycled.hpp"
#include "selection.hpp"
#include "sparse_merge.hpp"

namespace {

using syncline::Instructions;
using syncline::SparseVector;

using Random = std::mt19937_64;

template <typename T>
T uniform(Random& random, T low, T high) {
    return std::uniform_int_distribution<T>(low, high)(random);
}

std::vector<Instructions> available() {
    std::vector<Instructions> found;
    for (const auto each : {Instructions::portable, Instructions::avx2, Instructions::avx512}) {
        if (syncline::has_instructions(each)) found.push_back(each);
    }
    return found;
}

// By sorting: the definition.
SparseVector largest_of(const std::vector<float>& values, std::size_t k) {
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < values.size(); ++i) {
        if (values[i] != 0.0F) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return std::abs(values[a]) > std::abs(values[b]);
    });
    order.resize(std::min(k, order.size()));
    std::sort(order.begin(), order.end());
    SparseVector result;
    for (const std::uint32_t i : order) result.add(i, values[i]);
    return result;
}

bool same(const SparseVector& a, const SparseVector& b) {
    return a.indices == b.indices &&
           std::equal(a.values.begin(), a.values.end(), b.values.begin(), b.values.end(),
                      [](float x, float y) {
                          return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
                      });
}

// From one array alone, or from the same one cut into parts.
syncline::Selection selected(std::vector<float>& values, const syncline::Wanted& wanted, bool clear,
                             Instructions instructions, std::size_t parts = 1) {
    std::vector<syncline::Part> cut;
    for (std::size_t i = 0; i < parts; ++i) {
        const std::size_t start = i * values.size() / parts;
        const std::size_t stop = (i + 1) * values.size() / parts;
        cut.push_back({.values = values.data() + start, .count = stop - start});
    }
    return syncline::select(cut, 0.0F, wanted, clear, instructions);
}

enum class Shape : std::uint8_t { normal, few_values, zeros, rising, sparse, tiny, count };

std::vector<float> drawn(Random& random, std::size_t count, Shape shape) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) {
        const float value = normal(random);
        switch (shape) {
            case Shape::few_values:
                values[i] = std::round(value);
                break;
            case Shape::zeros:
                values[i] = value < 0 ? -0.0F : 0.0F;
                break;
            case Shape::rising:
                values[i] = static_cast<float>(i) * (value < 0 ? -1.0F : 1.0F);
                break;
            case Shape::sparse:
                values[i] = uniform(random, 0, 500) == 0 ? value : 0.0F;
                break;
            case Shape::tiny:
                values[i] = value * 1e-41F;
                break;
            default:
                values[i] = value;
        }
    }
    return values;
}

void test_selection_is_exact() {
    Random random(1);
    for (int run = 0; run < 240; ++run) {
        const bool large = run % 12 == 0;
        const std::size_t count = uniform<std::size_t>(random, 0, large ? 700'000 : 6'000);
        const auto shape = static_cast<Shape>(run % static_cast<int>(Shape::count));
        const std::vector<float> values = drawn(random, count, shape);
        const std::size_t k = run % 5 == 0 ? count : uniform<std::size_t>(random, 0, count / 20);
        const SparseVector expected = largest_of(values, k);
        for (const Instructions each : available()) {
            std::vector<float> left = values;
            const auto found =
                selected(left, {.k = k, .least = k, .most = k}, true, each, 1 + run % 4);
            CHECK(found.finite && found.exact);
            CHECK(same(found.taken, expected));
            std::vector<float> rest = values;
            for (const std::uint32_t i : expected.indices) rest[i] = 0.0F;
            CHECK(left == rest);
        }
    }
}

// A guess that is much too high or low, and data that fill the buffer over and over.
void test_any_hint_is_exact() {
    Random random(2);
    for (int run = 0; run < 60; ++run) {
        const std::size_t count = uniform<std::size_t>(random, 1, 60'000);
        const std::vector<float> values = drawn(random, count, static_cast<Shape>(run % 4));
        const std::size_t k = uniform<std::size_t>(random, 1, std::max<std::size_t>(1, count / 50));
        const std::uint32_t hint =
            std::bit_cast<std::uint32_t>(std::abs(std::normal_distribution<float>(1, 2)(random)));
        for (const Instructions each : available()) {
            std::vector<float> left = values;
            const auto found = selected(
                left, {.k = k, .least = k, .most = k, .hint = std::max(hint, 1U)}, false, each);
            CHECK(same(found.taken, largest_of(values, k)));
            CHECK(left == values);
        }
    }
}

void test_reuse_keeps_its_bound() {
    Random random(3);
    for (int run = 0; run < 100; ++run) {
        const std::vector<float> values = drawn(random, 20'000, static_cast<Shape>(run % 5));
        const std::size_t k = uniform<std::size_t>(random, 1, 300);
        const syncline::Wanted wanted{.k = k,
                                      .least = k / 2,
                                      .most = 2 * k,
                                      .hint = std::bit_cast<std::uint32_t>(
                                          static_cast<float>(uniform(random, 1, 40)) / 10.0F)};
        for (const Instructions each : available()) {
            std::vector<float> left = values;
            const auto found = selected(left, wanted, false, each);
            if (found.exact) {
                CHECK(same(found.taken, largest_of(values, k)));
            } else {
                CHECK(found.taken.size() >= k / 2 && found.taken.size() <= 2 * k);
                CHECK(same(found.taken, largest_of(values, found.taken.size())));
            }
        }
    }
    CHECK(refused([] {
        std::vector<float> none;
        static_cast<void>(
            selected(none, {.k = 1, .least = 2, .most = 2}, false, Instructions::portable));
    }));
}

void test_updates_are_the_same_bits() {
    Random random(4);
    for (int run = 0; run < 40; ++run) {
        const std::size_t count = uniform<std::size_t>(random, 0, run % 8 == 0 ? 600'000 : 9'000);
        const std::vector<float> residual = drawn(random, count, Shape::normal);
        const std::vector<float> gradient = drawn(random, count, Shape::normal);
        const std::vector<float> velocity = drawn(random, count, Shape::normal);
        const std::size_t k = count / 100 + 1;
        const bool moving = run % 2 == 1;
        std::vector<float> sum = residual;
        std::vector<float> speed = velocity;
        for (std::size_t i = 0; i < count; ++i) {
            speed[i] = 0.9F * velocity[i] + gradient[i];
            sum[i] += moving ? speed[i] : gradient[i];
        }
        const SparseVector expected = largest_of(sum, k);
        for (const std::uint32_t i : expected.indices) sum[i] = speed[i] = 0.0F;
        for (const Instructions each : available()) {
            std::vector<float> left = residual;
            std::vector<float> moved = velocity;
            const syncline::Part part{left.data(), gradient.data(), moving ? moved.data() : nullptr,
                                      count};
            const auto found =
                syncline::select({&part, 1}, 0.9F, {.k = k, .least = k, .most = k}, true, each);
            CHECK(same(found.taken, expected));
            CHECK(left == sum);
            CHECK(moved == (moving ? speed : velocity));
        }
    }
}

void test_what_is_not_finite() {
    Random random(5);
    for (int run = 0; run < 200; ++run) {
        std::vector<float> values =
            drawn(random, uniform<std::size_t>(random, 1, 5'000), Shape::normal);
        const std::size_t at = uniform<std::size_t>(random, 0, values.size() - 1);
        for (const Instructions each : available()) {
            CHECK(syncline::first_not_finite(values.data(), values.size(), each) == values.size());
        }
        values[at] = run % 2 == 0 ? -std::numeric_limits<float>::infinity()
                                  : std::numeric_limits<float>::quiet_NaN();
        values.back() = std::numeric_limits<float>::infinity();
        for (const Instructions each : available()) {
            CHECK(syncline::first_not_finite(values.data(), values.size(), each) == at);
            std::vector<float> left = values;
            const auto found = selected(left, {.k = 1, .least = 1, .most = 1}, true, each);
            CHECK(!found.finite && found.taken.size() == 0);
        }
    }
}

void test_merge() {
    Random random(6);
    for (int run = 0; run < 300; ++run) {
        const std::size_t count = uniform<std::size_t>(random, 0, 400);
        const auto shape = run % 2 == 0 ? Shape::few_values : Shape::normal;
        const std::vector<float> a = drawn(random, count, shape);
        const std::vector<float> b = drawn(random, count, shape);
        std::vector<float> sum(count);
        const SparseVector left = largest_of(a, uniform<std::size_t>(random, 0, count));
        const SparseVector right = largest_of(b, uniform<std::size_t>(random, 0, count));
        for (std::size_t i = 0; i < left.size(); ++i) sum[left.indices[i]] += left.values[i];
        for (std::size_t i = 0; i < right.size(); ++i) sum[right.indices[i]] += right.values[i];
        const std::size_t k = uniform<std::size_t>(random, 0, count);
        // Cut in two, of which the first may be empty.
        const std::size_t cut = uniform<std::size_t>(random, 0, count);
        const std::vector<syncline::Quota> parts = {{cut, k / 2}, {count, k}};
        const auto [kept, dropped] =
            syncline::keep_largest(syncline::sum_of(left.view(), right.view()), parts);
        const auto middle = sum.begin() + static_cast<std::ptrdiff_t>(cut);
        SparseVector expected = largest_of({sum.begin(), middle}, k / 2);
        const SparseVector second = largest_of({middle, sum.end()}, k);
        for (std::size_t i = 0; i < second.size(); ++i) {
            expected.add(second.indices[i] + static_cast<std::uint32_t>(cut), second.values[i]);
        }
        CHECK(same(kept, expected));
        if (!kept.indices.empty()) {
            const std::vector<syncline::Quota> short_one = {{kept.indices.back(), k}};
            CHECK(refused(
                [&] { static_cast<void>(syncline::keep_largest(SparseVector(kept), short_one)); }));
        }
        for (const std::uint32_t i : kept.indices) sum[i] = 0.0F;
        CHECK(same(dropped, largest_of(sum, count)));
        const auto [chosen, others] = syncline::divided(left.view(), right.indices);
        CHECK(same(syncline::sum_of(chosen.view(), others.view()), left));
        CHECK(std::ranges::includes(right.indices, chosen.indices));
        for (const std::uint32_t i : others.indices) {
            CHECK(!std::ranges::binary_search(right.indices, i));
        }
    }
}

// What a peer sends may hold zeros, infinities and NaN: each entry is in one of the two all the
// same.
void test_merge_of_any_values() {
    const float odd[] = {0.0F, -0.0F, std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::quiet_NaN(), 1.0F};
    for (std::uint32_t drawn = 0; drawn < 3125; ++drawn) {
        SparseVector vector;
        std::uint32_t rest = drawn;
        for (std::uint32_t i = 0; i < 5; ++i, rest /= 5) vector.add(i, odd[rest % 5]);
        for (std::uint64_t k = 0; k <= 5; ++k) {
            const std::vector<syncline::Quota> parts = {{2, k}, {5, k / 2}};
            const auto [kept, dropped] = syncline::keep_largest(SparseVector(vector), parts);
            CHECK(kept.size() == std::min<std::size_t>(2, k) + k / 2);
            CHECK(kept.size() + dropped.size() == 5);
        }
    }
}

void test_index_code() {
    Random random(7);
    for (int run = 0; run < 400; ++run) {
        const std::size_t universe = std::size_t{1} << uniform(random, 0, 32);
        std::vector<std::uint32_t> indices(uniform<std::size_t>(random, 0, 200));
        for (std::uint32_t& index : indices) {
            index = static_cast<std::uint32_t>(uniform<std::uint64_t>(random, 0, universe - 1));
        }
        std::sort(indices.begin(), indices.end());
        indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
        const auto bytes = syncline::coded(indices);
        CHECK(bytes.size() <= syncline::longest_code(indices.size(), universe));
        std::vector<std::uint32_t> back(indices.size());
        CHECK(syncline::decode(bytes, universe, back) == bytes.size());
        CHECK(back == indices);
        if (indices.empty()) continue;
        CHECK(refused([&] { syncline::decode(bytes, indices.back(), back); }));
        const std::span all(bytes);
        CHECK(refused([&] { syncline::decode(all.first(all.size() - 1), universe, back); }));
    }
    const std::vector<std::byte> long_form = {std::byte{0xff}, std::byte{0xff}, std::byte{3},
                                              std::byte{0},    std::byte{0},    std::byte{0}};
    std::vector<std::uint32_t> one(1);
    CHECK(refused([&] { syncline::decode(long_form, 100, one); }));
}

void test_narrow_values() {
    const std::vector<float> values = {1.0F, -3e38F, 3.4e38F, 70000.0F, 1e-9F, -0.1F};
    for (const auto dtype : {syncline::Dtype::bfloat16, syncline::Dtype::float16}) {
        std::vector<std::uint16_t> bits(values.size());
        std::vector<float> back(values.size());
        syncline::narrowed(dtype, values.data(), bits.data(), values.size());
        syncline::widened(dtype, bits.data(), back.data(), values.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
            CHECK(std::isfinite(back[i]) && std::abs(back[i]) <= std::abs(values[i]) * 1.01F);
        }
        CHECK(back[0] == 1.0F);
    }
}

// What is sent and what is kept add up exactly, and every byte can be decoded.
void test_8_bits() {
    Random random(11);
    for (int round = 0; round < 300; ++round) {
        const auto count = uniform<std::size_t>(random, 0, 700);
        const float size = std::ldexp(1.0F, uniform(random, -140, 120));
        std::normal_distribution<float> normal;
        std::vector<float> values(count);
        std::vector<float> residual(count);
        for (auto& each : values) each = size * normal(random);
        for (auto& each : residual) each = size * normal(random) / 256;
        std::vector<float> due = values;
        std::vector<float> taken = residual;
        syncline::int8_take(due.data(), taken.data(), count, 0.5F);
        std::vector<std::uint8_t> encoded(count + (count + 127) / 128);
        syncline::int8_encode(values.data(), residual.data(), count, 0.5F, encoded.data());
        std::vector<float> decoded(count, 1.0F);
        syncline::int8_decode(encoded.data(), count, decoded.data(), false);
        for (std::size_t i = 0; i < count; ++i) {
            CHECK(decoded[i] == values[i]);
            CHECK(values[i] + residual[i] == due[i] + taken[i]);
        }
        for (auto& each : encoded) each = static_cast<std::uint8_t>(random());
        syncline::int8_decode(encoded.data(), count, decoded.data(), true);
    }
}

}  // namespace

// A block comes back for whatever has as many bits; and more than the bound is freed, not kept.
void test_recycled_memory() {
    syncline::BlockCache cache;
    const std::size_t size = syncline::BlockCache::least_bytes;
    void* first = cache.take(size - 1);
    cache.give(first, size - 1);
    void* larger = cache.take(size + 1);
    CHECK(larger != first);
    CHECK(cache.take(size) == first);
    cache.give(first, size);
    cache.give(larger, 2 * size);
    CHECK(cache.take(2 * size) == larger);
    cache.give(larger, 2 * size);
    std::vector<void*> many;
    for (std::size_t i = 0; i <= syncline::BlockCache::most_kept_bytes / size; ++i) {
        many.push_back(cache.take(size));
    }
    for (void* block : many) cache.give(block, size);
    CHECK(cache.kept_bytes() <= syncline::BlockCache::most_kept_bytes);
    cache.clear();
    CHECK(cache.kept_bytes() == 0);

    syncline::RecycledVector<float> values(size, 1.0F);
    values.resize(2 * size);
    std::fill(values.begin(), values.end(), 2.0F);
    const syncline::RecycledVector<float> copy = values;
    CHECK(copy == values);
}

// Even if another thread had the lock of the freed blocks when the process was forked.
void test_forked_processes_free_memory() {
    using Block = syncline::RecycledVector<float>;
    std::atomic<bool> done = false;
    std::thread busy([&] {
        while (!done) Block(syncline::BlockCache::least_bytes);
    });
    for (int i = 0; i < 300; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(30);
            Block(syncline::BlockCache::least_bytes);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    done = true;
    busy.join();
}

int main() {
    test_recycled_memory();
    test_forked_processes_free_memory();
    test_selection_is_exact();
    test_any_hint_is_exact();
    test_reuse_keeps_its_bound();
    test_updates_are_the_same_bits();
    test_what_is_not_finite();
    test_merge();
    test_merge_of_any_values();
    test_index_code();
    test_narrow_values();
    test_8_bits();
    std::printf("sparse: %d failed, %zu sets of instructions\n", failed.load(), available().size());
    return failed == 0 ? 0 : 1;
}
