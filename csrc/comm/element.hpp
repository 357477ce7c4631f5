// Elements of tensors and how two of them are combined. Knows nothing of who sends what.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

enum class Dtype : std::uint8_t {
    float32,
    float64,
    bfloat16,
    float16,
    int8,
    int32,
    int64,
    uint8,
    boolean,
};

enum class Reduction : std::uint8_t { sum, average, minimum, maximum, product, band, bor, bxor };

[[nodiscard]] std::size_t size_of(Dtype dtype);
[[nodiscard]] const char* name_of(Dtype dtype);
[[nodiscard]] const char* name_of(Reduction reduction);

// Whether the reduction exists for elements of the dtype: bitwise ones for integers and booleans,
// averages for all but booleans.
[[nodiscard]] bool exists(Reduction reduction, Dtype dtype);

// result[i] = a[i] (reduction) b[i] for `count` elements. `result` may be `a`; nothing else may
// overlap. Elements of 16 bits are combined as float and rounded to the nearest even. The operands
// can be exchanged without changing a bit, but for NaN's payload. `average` sums: see divide().
void combine(Reduction reduction, Dtype dtype, void* result, const void* a, const void* b,
             std::size_t count);

// data[i] = data[i] / divisor; integers are rounded towards zero.
void divide(Dtype dtype, void* data, std::size_t count, std::uint32_t divisor);

// One hop of a ring that sums in float32, in one pass: factor * values + arrived, rounded to
// `dtype`. In bfloat16 the sum replaces what arrived and, if it is the `last`, the values; in
// float32 the values only.
void add_scaled(Dtype dtype, float* values, void* arrived, std::size_t count, float factor,
                bool last);

// result[i] = factor * values[i], rounded to bfloat16.
void scaled(const float* values, std::uint16_t* result, std::size_t count, float factor);

// Round to 16 bits, to the nearest even; values beyond the largest number become that number, so
// that the remainder is finite.
void narrowed(Dtype dtype, const float* values, std::uint16_t* result, std::size_t count);

// Convert to 32 bits, exactly.
void widened(Dtype dtype, const std::uint16_t* values, float* result, std::size_t count);

}  // namespace syncline
