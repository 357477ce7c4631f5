#include "sparse_merge.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "selection.hpp"

namespace syncline {

namespace {

// Room for so many entries, of which the first `size` will be kept. Which entry goes where cannot
// be predicted, so the loops below write every entry, and only advance past those to keep.
SparseVector room_for(std::size_t entries) {
    SparseVector vector;
    vector.indices.resize(entries);
    vector.values.resize(entries);
    return vector;
}

void put(SparseVector& vector, std::size_t at, std::uint32_t index, float value) {
    vector.indices[at] = index;
    vector.values[at] = value;
}

void cut_off(SparseVector& vector, std::size_t size) {
    vector.indices.resize(size);
    vector.values.resize(size);
}

// 1 if a < b, else 0, by their difference's sign; both are less than 2^63 apart. The compiler would
// turn a comparison into a branch, which cannot be predicted for random indices: every second entry
// would then cost as much as five.
std::uint64_t below(std::int64_t a, std::int64_t b) {
    return static_cast<std::uint64_t>(a - b) >> 63;
}

float chosen_or_zero(float value, std::uint64_t chosen) {
    const auto mask = static_cast<std::uint32_t>(0U - chosen);
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & mask);
}

}  // namespace

SparseVector sum_of(const SparseView& a, const SparseView& b) {
    SparseVector sum = room_for(a.indices.size() + b.indices.size());
    std::size_t size = 0;
    std::size_t i = 0;
    std::size_t j = 0;
    while (i < a.indices.size() && j < b.indices.size()) {
        const std::uint32_t left = a.indices[i];
        const std::uint32_t right = b.indices[j];
        const std::uint64_t from_a = 1 - below(right, left);
        const std::uint64_t from_b = 1 - below(left, right);
        // A missing entry counts as zero, and adding zero changes no bit of another number.
        const float value =
            chosen_or_zero(a.values[i], from_a) + chosen_or_zero(b.values[j], from_b);
        put(sum, size, std::min(left, right), value);
        size += value != 0.0F ? 1 : 0;
        i += from_a;
        j += from_b;
    }
    for (; i < a.indices.size(); ++i) put(sum, size++, a.indices[i], a.values[i]);
    for (; j < b.indices.size(); ++j) put(sum, size++, b.indices[j], b.values[j]);
    cut_off(sum, size);
    return sum;
}

Kept keep_largest(SparseVector&& sum, std::span<const Quota> parts) {
    if (!sum.indices.empty() && (parts.empty() || sum.indices.back() >= parts.back().end)) {
        throw std::invalid_argument("an entry is beyond the last part");
    }
    if (parts.size() == 1 && sum.size() <= parts.front().k) return {std::move(sum), {}};
    std::vector<std::size_t> stops;
    std::size_t start = 0;
    std::size_t room = 0;
    for (const auto& [end, k] : parts) {
        const auto first = sum.indices.begin() + static_cast<std::ptrdiff_t>(start);
        const auto after = std::lower_bound(first, sum.indices.end(), end);
        stops.push_back(static_cast<std::size_t>(after - sum.indices.begin()));
        room += std::min<std::size_t>(k, stops.back() - start);
        start = stops.back();
    }
    // Each has room for one more than it gets: entries of the other are written there too.
    Kept result{room_for(room + 1), room_for(sum.size() - room + 1)};
    std::size_t kept = 0;
    std::size_t dropped = 0;
    start = 0;
    for (std::size_t part = 0; part < parts.size(); ++part) {
        const std::size_t k = parts[part].k;
        const std::size_t stop = stops[part];
        // Exactly as many are kept as there is room for, whatever the values.
        std::int64_t limit = -1;  // everything is above it
        std::size_t ties = 0;
        if (k == 0) {
            limit = std::numeric_limits<std::int64_t>::max();
        } else if (stop - start > k) {
            const Cut cut = cut_of(std::span(sum.values).subspan(start, stop - start), k);
            limit = cut.magnitude;
            ties = k - cut.above;
        }
        for (; start < stop; ++start) {
            const std::uint32_t index = sum.indices[start];
            const float value = sum.values[start];
            const std::int64_t magnitude = magnitude_of(value);
            const std::size_t tie = magnitude == limit && ties > 0 ? 1 : 0;
            const std::size_t keep = below(limit, magnitude) | tie;
            ties -= tie;
            put(result.kept, kept, index, value);
            put(result.dropped, dropped, index, value);
            kept += keep;
            dropped += 1 - keep;
        }
    }
    cut_off(result.kept, kept);
    cut_off(result.dropped, dropped);
    return result;
}

Divided divided(const SparseView& entries, std::span<const std::uint32_t> indices) {
    const std::size_t count = entries.indices.size();
    Divided result{room_for(std::min(count, indices.size()) + 1), room_for(count)};
    std::size_t chosen = 0;
    std::size_t others = 0;
    std::size_t i = 0;
    std::size_t j = 0;
    while (i < count && j < indices.size()) {
        const std::uint32_t index = entries.indices[i];
        const std::uint32_t next = indices[j];
        put(result.chosen, chosen, index, entries.values[i]);
        put(result.others, others, index, entries.values[i]);
        const std::uint64_t passed = below(index, next);
        const std::uint64_t skipped = below(next, index);
        chosen += 1 - passed - skipped;
        others += passed;
        i += 1 - skipped;
        j += 1 - passed;
    }
    for (; i < count; ++i) put(result.others, others++, entries.indices[i], entries.values[i]);
    cut_off(result.chosen, chosen);
    cut_off(result.others, others);
    return result;
}

}  // namespace syncline
