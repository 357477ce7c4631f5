// A vector of which only some elements are given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "recycled.hpp"

namespace syncline {

// Entries in ascending order of their indices, each of which occurs once.
struct SparseView {
    std::span<const std::uint32_t> indices;
    std::span<const float> values;
};

struct SparseVector {
    RecycledVector<std::uint32_t> indices;
    RecycledVector<float> values;

    [[nodiscard]] std::size_t size() const { return indices.size(); }
    [[nodiscard]] SparseView view() const { return {indices, values}; }
    void add(std::uint32_t index, float value) {
        indices.push_back(index);
        values.push_back(value);
    }
};

}  // namespace syncline
