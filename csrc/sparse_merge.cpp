#include "sparse_merge.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "selection.hpp"

namespace syncline {

namespace {

// Room for so many entries, of which the first `size` will be kept. Which entry goes where cannot
// be predicted, so the loops below write every entry and only move on where it is one to keep.
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

}  // namespace

SparseVector sum_of(const SparseView& a, const SparseView& b) {
    SparseVector sum = room_for(a.indices.size() + b.indices.size());
    std::size_t size = 0;
    std::size_t i = 0;
    std::size_t j = 0;
    while (i < a.indices.size() && j < b.indices.size()) {
        const std::uint32_t left = a.indices[i];
        const std::uint32_t right = b.indices[j];
        const bool from_a = left <= right;
        const bool from_b = right <= left;
        // What is not there counts as zero, and adding zero changes no bit of another number.
        const float value = (from_a ? a.values[i] : 0.0F) + (from_b ? b.values[j] : 0.0F);
        put(sum, size, from_a ? left : right, value);
        size += value != 0.0F ? 1 : 0;
        i += from_a ? 1 : 0;
        j += from_b ? 1 : 0;
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
            const std::int64_t magnitude = magnitude_of(sum.values[start]);
            const bool tie = magnitude == limit && ties > 0;
            ties -= tie ? 1 : 0;
            const bool keep = magnitude > limit || tie;
            put(result.kept, kept, sum.indices[start], sum.values[start]);
            put(result.dropped, dropped, sum.indices[start], sum.values[start]);
            kept += keep ? 1 : 0;
            dropped += keep ? 0 : 1;
        }
    }
    cut_off(result.kept, kept);
    cut_off(result.dropped, dropped);
    return result;
}

Divided divided(const SparseView& entries, std::span<const std::uint32_t> indices) {
    Divided result;
    std::size_t j = 0;
    for (std::size_t i = 0; i < entries.indices.size(); ++i) {
        const std::uint32_t index = entries.indices[i];
        while (j < indices.size() && indices[j] < index) ++j;
        const bool chosen = j < indices.size() && indices[j] == index;
        (chosen ? result.chosen : result.others).add(index, entries.values[i]);
    }
    return result;
}

}  // namespace syncline
