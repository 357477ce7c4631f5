#include "selection.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "recycled.hpp"

namespace syncline {

namespace {

constexpr std::size_t block_elements = 4096;  // 16 KiB: stays in the first cache
constexpr std::size_t least_room = 4 * block_elements;
constexpr std::size_t sampled_line = 16;  // elements that lie together: a line of the cache
constexpr std::size_t fewest_lines = 256;
constexpr std::size_t most_lines = 4096;
constexpr std::size_t elements_a_line = 1024;
constexpr std::size_t sampled_from = 8 * sampled_line * fewest_lines;  // below, it gains nothing

// Counts magnitudes by some of their bits, and finds the bin in which the k-th largest lies.
struct Digit {
    int shift;
    std::uint32_t bins;
};
constexpr std::array<Digit, 3> digits = {{{20, 2048}, {10, 1024}, {0, 1024}}};

// Room for candidates, not initialised: most of it is never touched.
class Buffer {
  public:
    explicit Buffer(std::size_t capacity)
        : capacity_(capacity),
          values_(std::make_unique_for_overwrite<float[]>(capacity + scan_padding)),
          indices_(std::make_unique_for_overwrite<std::uint32_t[]>(capacity + scan_padding)) {}

    [[nodiscard]] std::size_t capacity() const { return capacity_; }
    [[nodiscard]] Candidates empty() { return {values_.get(), indices_.get(), 0}; }

  private:
    std::size_t capacity_;
    std::unique_ptr<float[]> values_;
    std::unique_ptr<std::uint32_t[]> indices_;
};

// Keep the k largest, in order, of more than k; return the magnitude of the smallest.
std::uint32_t keep_largest(Candidates& candidates, std::size_t k) {
    const Cut cut = cut_of({candidates.values, candidates.count}, k);
    std::size_t ties = k - cut.above;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < candidates.count; ++i) {
        const float value = candidates.values[i];
        const std::uint32_t magnitude = magnitude_of(value);
        if (magnitude < cut.magnitude) continue;
        if (magnitude == cut.magnitude) {
            if (ties == 0) continue;
            --ties;
        }
        candidates.values[kept] = value;
        candidates.indices[kept] = candidates.indices[i];
        ++kept;
    }
    candidates.count = kept;
    return cut.magnitude;
}

float value_after_update(const Part& part, float momentum, std::size_t i) {
    float added = 0.0F;
    if (part.gradient != nullptr) added = part.gradient[i];
    if (part.velocity != nullptr) added = momentum * part.velocity[i] + added;
    return part.values[i] + added;
}

// A magnitude that somewhat more than k elements exceed, as far as a sample can tell, or 0.
std::uint32_t guessed_threshold(std::span<const Part> parts, float momentum, std::size_t count,
                                std::size_t k) {
    if (count < sampled_from) return 0;
    const std::size_t lines = std::clamp(count / elements_a_line, fewest_lines, most_lines);
    std::vector<float> sample;
    sample.reserve(lines * sampled_line);
    // A line from every stretch, at a place that differs from stretch to stretch: gradients have
    // rows and columns, with which equal distances could fall in step.
    const std::size_t stretch = count / lines;
    std::uint32_t random = 0x9e3779b9U;
    auto part = parts.begin();
    std::size_t before = 0;  // elements of the parts before this one
    for (std::size_t line = 0; line < lines; ++line) {
        random = random * 1664525U + 1013904223U;
        const std::size_t places = stretch - sampled_line + 1;
        const std::size_t first = line * stretch + (random >> 8) % places;
        while (first >= before + part->count) before += (part++)->count;
        const std::size_t start = first - before;
        for (std::size_t i = start; i < std::min(start + sampled_line, part->count); ++i) {
            sample.push_back(value_after_update(*part, momentum, i));
        }
    }
    const double share = static_cast<double>(k) / static_cast<double>(count);
    const double expected = share * static_cast<double>(sample.size());
    // Lines are correlated, so their deviation is larger than that of independent samples.
    const double rank = 1.2 * expected + 6.0 * std::sqrt(expected) + 4.0;
    if (rank >= static_cast<double>(sample.size())) return 0;
    const std::uint32_t cut = cut_of(sample, static_cast<std::size_t>(rank)).magnitude;
    return cut == 0 ? 0 : cut - 1;
}

// Set to zero what was taken; the indices ascend.
void clear_taken(std::span<const Part> parts, std::span<const std::uint32_t> indices) {
    std::size_t before = 0;
    auto part = parts.begin();
    for (const std::uint32_t index : indices) {
        while (index >= before + part->count) before += (part++)->count;
        part->values[index - before] = 0.0F;
        if (part->velocity != nullptr) part->velocity[index - before] = 0.0F;
    }
}

}  // namespace

Cut cut_of(std::span<const float> values, std::size_t k) {
    if (k == 0 || k > values.size()) throw std::invalid_argument("k must be 1 to all");
    std::vector<std::uint32_t> histogram;
    RecycledVector<std::uint32_t> left;  // the magnitudes that share the bits found so far
    std::uint32_t found = 0;
    std::size_t above = 0;
    bool first = true;
    for (const auto& [shift, bins] : digits) {
        histogram.assign(2 * bins, 0);
        const auto bin_of = [shift, bins](std::uint32_t m) { return (m >> shift) & (bins - 1); };
        if (first) {
            // Neighbours often fall into one bin and would wait for its count: so two histograms.
            const std::size_t pairs = values.size() / 2 * 2;
            for (std::size_t i = 0; i < pairs; i += 2) {
                ++histogram[bin_of(magnitude_of(values[i]))];
                ++histogram[bins + bin_of(magnitude_of(values[i + 1]))];
            }
            if (pairs < values.size()) ++histogram[bin_of(magnitude_of(values.back()))];
            for (std::uint32_t bin = 0; bin < bins; ++bin) histogram[bin] += histogram[bins + bin];
        } else {
            for (const std::uint32_t magnitude : left) ++histogram[bin_of(magnitude)];
        }
        std::uint32_t bin = bins - 1;
        while (above + histogram[bin] < k) above += histogram[bin--];
        found |= bin << shift;
        if (shift == 0) break;
        if (first) {
            // Which ones are in the bin cannot be predicted: all are written, and some overwritten.
            left.resize(histogram[bin] + 1);
            std::size_t size = 0;
            for (const float value : values) {
                const std::uint32_t magnitude = magnitude_of(value);
                left[size] = magnitude;
                size += bin_of(magnitude) == bin ? 1 : 0;
            }
            left.pop_back();
        } else {
            std::erase_if(left, [&](std::uint32_t m) { return bin_of(m) != bin; });
        }
        first = false;
    }
    return {found, above};
}

Selection select(std::span<const Part> parts, float momentum, const Wanted& wanted, bool clear,
                 Instructions instructions) {
    if (wanted.least > wanted.k || wanted.k > wanted.most) {
        throw std::invalid_argument("expected least <= k <= most");
    }
    std::size_t count = 0;
    for (const Part& part : parts) count += part.count;
    if (count > std::numeric_limits<std::uint32_t>::max()) {
        throw std::invalid_argument("at most 2^32 - 1 elements can be selected from");
    }
    const std::size_t k = std::min(wanted.k, count);
    const std::size_t most = std::min(wanted.most, count);
    Buffer buffer(std::min(count, 2 * most + least_room));
    Candidates candidates = buffer.empty();
    std::uint32_t threshold = wanted.hint;
    if (k == 0) {
        threshold = std::numeric_limits<std::int32_t>::max();  // nothing is above this, not NaN
    } else if (threshold == 0) {
        threshold = guessed_threshold(parts, momentum, count, k);
    }
    bool cut_down = false;

    const auto collect = [&](bool updating) {
        std::size_t first = 0;
        for (const Part& part : parts) {
            Streams streams{.values = part.values, .first = first};
            if (updating) {
                streams.gradient = part.gradient;
                streams.velocity = part.velocity;
                streams.momentum = momentum;
            }
            const Scan scan = scan_with(instructions, streams);
            for (std::size_t start = 0; start < part.count; start += block_elements) {
                const std::size_t stop = std::min(part.count, start + block_elements);
                if (candidates.count + (stop - start) > buffer.capacity()) {
                    threshold = keep_largest(candidates, k);
                    cut_down = true;
                }
                scan(streams, start, stop, threshold, candidates);
            }
            first += part.count;
        }
    };
    collect(true);
    // What is not finite is above every threshold and kept before all else, so it is found here.
    const bool enough = candidates.count >= std::min(wanted.least, k);
    if (!enough && threshold != 0) {
        candidates.count = 0;
        threshold = 0;
        collect(false);
    }
    const bool as_hinted = wanted.hint != 0 && enough && !cut_down && candidates.count <= most;
    if (candidates.count > k && !as_hinted) threshold = keep_largest(candidates, k);
    Selection selection;
    selection.threshold = threshold;
    selection.exact = !as_hinted || candidates.count == k;
    for (std::size_t i = 0; i < candidates.count; ++i) {
        selection.finite &= magnitude_of(candidates.values[i]) < infinite_magnitude;
    }
    if (!selection.finite) return selection;
    selection.taken.indices.assign(candidates.indices, candidates.indices + candidates.count);
    selection.taken.values.assign(candidates.values, candidates.values + candidates.count);
    if (clear) clear_taken(parts, selection.taken.indices);
    return selection;
}

}  // namespace syncline
