#include "sparse_merge.hpp"

#include <utility>

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

Kept keep_largest(SparseVector&& sum, std::size_t k) {
    if (sum.size() <= k) return {std::move(sum), {}};
    if (k == 0) return {{}, std::move(sum)};
    const Cut cut = cut_of(sum.values, k);
    std::size_t ties = k - cut.above;
    Kept result;
    result.kept.indices.reserve(k);
    result.kept.values.reserve(k);
    result.dropped.indices.reserve(sum.size() - k);
    result.dropped.values.reserve(sum.size() - k);
    for (std::size_t i = 0; i < sum.size(); ++i) {
        const std::uint32_t magnitude = magnitude_of(sum.values[i]);
        bool keep = magnitude > cut.magnitude;
        if (magnitude == cut.magnitude && ties > 0) {
            keep = true;
            --ties;
        }
        (keep ? result.kept : result.dropped).add(sum.indices[i], sum.values[i]);
    }
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
