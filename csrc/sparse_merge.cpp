#include "sparse_merge.hpp"

#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>

#include "selection.hpp"

namespace syncline {

SparseVector sum_of(const SparseView& a, const SparseView& b) {
    SparseVector sum;
    sum.indices.reserve(a.indices.size() + b.indices.size());
    sum.values.reserve(a.indices.size() + b.indices.size());
    std::size_t i = 0;
    std::size_t j = 0;
    while (i < a.indices.size() && j < b.indices.size()) {
        if (a.indices[i] < b.indices[j]) {
            sum.add(a.indices[i], a.values[i]);
            ++i;
        } else if (b.indices[j] < a.indices[i]) {
            sum.add(b.indices[j], b.values[j]);
            ++j;
        } else {
            const float value = a.values[i] + b.values[j];
            if (value != 0.0F) sum.add(a.indices[i], value);
            ++i;
            ++j;
        }
    }
    for (; i < a.indices.size(); ++i) sum.add(a.indices[i], a.values[i]);
    for (; j < b.indices.size(); ++j) sum.add(b.indices[j], b.values[j]);
    return sum;
}

Kept keep_largest(const SparseVector& sum, std::span<const Quota> parts) {
    Kept result;
    std::size_t start = 0;
    for (const auto& [end, k] : parts) {
        const auto after = std::lower_bound(
            sum.indices.begin() + static_cast<std::ptrdiff_t>(start), sum.indices.end(), end);
        const auto stop = static_cast<std::size_t>(after - sum.indices.begin());
        Cut cut{0, 0};  // everything is above it
        std::size_t ties = 0;
        if (k == 0) {
            cut.magnitude = std::numeric_limits<std::uint32_t>::max();
        } else if (stop - start > k) {
            cut = cut_of(std::span(sum.values).subspan(start, stop - start), k);
            ties = k - cut.above;
        }
        for (; start < stop; ++start) {
            const std::uint32_t magnitude = magnitude_of(sum.values[start]);
            bool keep = magnitude > cut.magnitude;
            if (magnitude == cut.magnitude && ties > 0) {
                keep = true;
                --ties;
            }
            (keep ? result.kept : result.dropped).add(sum.indices[start], sum.values[start]);
        }
    }
    if (start != sum.size()) throw std::invalid_argument("an entry is beyond the last part");
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
