#include "element.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <stdexcept>
#include <type_traits>

#include "clones.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace syncline {

namespace {

struct Bfloat16 {
    std::uint16_t bits;
};

struct Float16 {
    std::uint16_t bits;
};

inline float widened(Bfloat16 value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline void narrow(float value, Bfloat16& result) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
    const std::uint32_t nan = (bits >> 16) | 0x40U;  // rounding could carry a NaN over to infinity
    result.bits =
        static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? nan : rounded >> 16);
}

inline float widened(Float16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
    const std::uint32_t rest = value.bits & 0x7fffU;
    if (rest >= 0x7c00U) {  // infinity and NaN
        return std::bit_cast<float>(sign | 0x7f800000U | ((rest & 0x3ffU) << 13));
    }
    // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal.
    const float scaled = std::bit_cast<float>(rest << 13) * 0x1p112F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
}

inline void narrow(float value, Float16& result) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) {
        result.bits = static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
    } else if (magnitude >= 0x477ff000U) {  // 65520 and above
        result.bits = static_cast<std::uint16_t>(sign | 0x7c00U);
    } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 rounds at the last place
        const float placed = std::bit_cast<float>(magnitude) + 0.5F;
        result.bits =
            static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(placed) - 0x3f000000U));
    } else {
        const std::uint32_t rounded = magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U);
        result.bits = static_cast<std::uint16_t>(sign | (rounded >> 13));
    }
}

struct Sum {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>) {
            using U = std::make_unsigned_t<T>;  // integers wrap around
            return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
        } else {
            return a + b;
        }
    }
};

struct Product {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>) {
            using U = std::make_unsigned_t<T>;
            return static_cast<T>(static_cast<std::uint64_t>(static_cast<U>(a)) *
                                  static_cast<std::uint64_t>(static_cast<U>(b)));
        } else {
            return a * b;
        }
    }
};

// A NaN wins, and of zeros the negative (positive) one, whatever the order of the operands.
struct Minimum {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_floating_point_v<T>) {
            if (a == b) return std::signbit(a) ? a : b;
            return a < b || a != a ? a : b;
        } else {
            return a < b ? a : b;
        }
    }
};

struct Maximum {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_floating_point_v<T>) {
            if (a == b) return std::signbit(a) ? b : a;
            return a > b || a != a ? a : b;
        } else {
            return a > b ? a : b;
        }
    }
};

struct And {
    template <typename T>
    T operator()(T a, T b) const {
        return static_cast<T>(a & b);
    }
};

struct Or {
    template <typename T>
    T operator()(T a, T b) const {
        return static_cast<T>(a | b);
    }
};

struct Xor {
    template <typename T>
    T operator()(T a, T b) const {
        return static_cast<T>(a ^ b);
    }
};

template <typename T, typename Operation>
inline void loop(T* result, const T* a, const T* b, std::size_t count) {
    const Operation operation;
    for (std::size_t i = 0; i < count; ++i) result[i] = operation(a[i], b[i]);
}

template <typename T, typename Operation>
inline void wide_loop(T* result, const T* a, const T* b, std::size_t count) {
    const Operation operation;
    for (std::size_t i = 0; i < count; ++i) {
        narrow(operation(widened(a[i]), widened(b[i])), result[i]);
    }
}

// What training sends most, in the widest vectors that the processor has.
SYNCLINE_CLONES void sum_float32(float* result, const float* a, const float* b, std::size_t n) {
    loop<float, Sum>(result, a, b, n);
}
SYNCLINE_CLONES void sum_float64(double* result, const double* a, const double* b, std::size_t n) {
    loop<double, Sum>(result, a, b, n);
}
SYNCLINE_CLONES void sum_bfloat16(Bfloat16* result, const Bfloat16* a, const Bfloat16* b,
                                  std::size_t n) {
    wide_loop<Bfloat16, Sum>(result, a, b, n);
}

SYNCLINE_CLONES void add_scaled_float32(float* __restrict values, const float* __restrict arrived,
                                        std::size_t n, float factor) {
    for (std::size_t i = 0; i < n; ++i) values[i] = values[i] * factor + arrived[i];
}
SYNCLINE_CLONES void pass_on_bfloat16(const float* __restrict values, Bfloat16* __restrict arrived,
                                      std::size_t n, float factor) {
    for (std::size_t i = 0; i < n; ++i) {
        narrow(values[i] * factor + widened(arrived[i]), arrived[i]);
    }
}
SYNCLINE_CLONES void keep_bfloat16(float* __restrict values, Bfloat16* __restrict arrived,
                                   std::size_t n, float factor) {
    for (std::size_t i = 0; i < n; ++i) {
        narrow(values[i] * factor + widened(arrived[i]), arrived[i]);
        values[i] = widened(arrived[i]);
    }
}
SYNCLINE_CLONES void scaled_bfloat16(const float* __restrict values, Bfloat16* __restrict result,
                                     std::size_t n, float factor) {
    for (std::size_t i = 0; i < n; ++i) narrow(values[i] * factor, result[i]);
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void sum_float16_f16c(Float16* result, const Float16* a,
                                                           const Float16* b, std::size_t count) {
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i)));
        const __m256 y = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i)));
        const __m128i sum =
            _mm256_cvtps_ph(_mm256_add_ps(x, y), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(result + i), sum);
    }
    wide_loop<Float16, Sum>(result + i, a + i, b + i, count - i);
}
#endif

void sum_float16(Float16* result, const Float16* a, const Float16* b, std::size_t count) {
#if defined(__x86_64__)
    static const bool has_f16c = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2");
    if (has_f16c) return sum_float16_f16c(result, a, b, count);
#endif
    wide_loop<Float16, Sum>(result, a, b, count);
}

template <typename T>
constexpr bool narrow_float = std::is_same_v<T, Bfloat16> || std::is_same_v<T, Float16>;

template <typename T, typename Operation>
void run(void* result, const void* a, const void* b, std::size_t count) {
    auto* to = static_cast<T*>(result);
    const auto* left = static_cast<const T*>(a);
    const auto* right = static_cast<const T*>(b);
    if constexpr (std::is_same_v<Operation, Sum> && std::is_same_v<T, float>) {
        sum_float32(to, left, right, count);
    } else if constexpr (std::is_same_v<Operation, Sum> && std::is_same_v<T, double>) {
        sum_float64(to, left, right, count);
    } else if constexpr (std::is_same_v<Operation, Sum> && std::is_same_v<T, Bfloat16>) {
        sum_bfloat16(to, left, right, count);
    } else if constexpr (std::is_same_v<Operation, Sum> && std::is_same_v<T, Float16>) {
        sum_float16(to, left, right, count);
    } else if constexpr (narrow_float<T>) {
        wide_loop<T, Operation>(to, left, right, count);
    } else {
        loop<T, Operation>(to, left, right, count);
    }
}

template <typename T>
void combine_as(Reduction reduction, void* result, const void* a, const void* b,
                std::size_t count) {
    switch (reduction) {
        case Reduction::sum:
        case Reduction::average:
            return run<T, Sum>(result, a, b, count);
        case Reduction::minimum:
            return run<T, Minimum>(result, a, b, count);
        case Reduction::maximum:
            return run<T, Maximum>(result, a, b, count);
        case Reduction::product:
            return run<T, Product>(result, a, b, count);
        default:
            break;
    }
    if constexpr (std::is_integral_v<T>) {
        switch (reduction) {
            case Reduction::band:
                return run<T, And>(result, a, b, count);
            case Reduction::bor:
                return run<T, Or>(result, a, b, count);
            case Reduction::bxor:
                return run<T, Xor>(result, a, b, count);
            default:
                break;
        }
    }
    throw std::invalid_argument("no such reduction for this dtype");
}

// A boolean is one byte that is 0 or 1: a sum is whether there is any, a product whether all are.
Reduction as_boolean(Reduction reduction) {
    switch (reduction) {
        case Reduction::sum:
        case Reduction::maximum:
            return Reduction::bor;
        case Reduction::product:
        case Reduction::minimum:
            return Reduction::band;
        default:
            return reduction;
    }
}

template <typename T>
void divide_as(void* data, std::size_t count, std::uint32_t divisor) {
    auto* values = static_cast<T*>(data);
    if constexpr (narrow_float<T>) {
        for (std::size_t i = 0; i < count; ++i) {
            narrow(widened(values[i]) / static_cast<float>(divisor), values[i]);
        }
    } else if constexpr (std::is_integral_v<T>) {  // towards zero; the divisor may not fit into T
        for (std::size_t i = 0; i < count; ++i) {
            values[i] = static_cast<T>(std::int64_t{values[i]} / std::int64_t{divisor});
        }
    } else {
        for (std::size_t i = 0; i < count; ++i) values[i] /= static_cast<T>(divisor);
    }
}

}  // namespace

std::size_t size_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::float64:
        case Dtype::int64:
            return 8;
        case Dtype::float32:
        case Dtype::int32:
            return 4;
        case Dtype::bfloat16:
        case Dtype::float16:
            return 2;
        case Dtype::int8:
        case Dtype::uint8:
        case Dtype::boolean:
            return 1;
    }
    throw std::invalid_argument("unknown dtype");
}

const char* name_of(Dtype dtype) {
    static constexpr const char* names[] = {"float32", "float64", "bfloat16", "float16", "int8",
                                            "int32",   "int64",   "uint8",    "bool"};
    const auto index = static_cast<std::size_t>(dtype);
    return index < std::size(names) ? names[index] : "an unknown dtype";
}

const char* name_of(Reduction reduction) {
    static constexpr const char* names[] = {"sum",     "avg",  "min", "max",
                                            "product", "band", "bor", "bxor"};
    const auto index = static_cast<std::size_t>(reduction);
    return index < std::size(names) ? names[index] : "an unknown reduction";
}

bool exists(Reduction reduction, Dtype dtype) {
    const bool floating = dtype == Dtype::float32 || dtype == Dtype::float64 ||
                          dtype == Dtype::bfloat16 || dtype == Dtype::float16;
    switch (reduction) {
        case Reduction::band:
        case Reduction::bor:
        case Reduction::bxor:
            return !floating;
        case Reduction::average:
            return dtype != Dtype::boolean;
        default:
            return true;
    }
}

void combine(Reduction reduction, Dtype dtype, void* result, const void* a, const void* b,
             std::size_t count) {
    switch (dtype) {
        case Dtype::float32:
            return combine_as<float>(reduction, result, a, b, count);
        case Dtype::float64:
            return combine_as<double>(reduction, result, a, b, count);
        case Dtype::bfloat16:
            return combine_as<Bfloat16>(reduction, result, a, b, count);
        case Dtype::float16:
            return combine_as<Float16>(reduction, result, a, b, count);
        case Dtype::int8:
            return combine_as<std::int8_t>(reduction, result, a, b, count);
        case Dtype::int32:
            return combine_as<std::int32_t>(reduction, result, a, b, count);
        case Dtype::int64:
            return combine_as<std::int64_t>(reduction, result, a, b, count);
        case Dtype::uint8:
            return combine_as<std::uint8_t>(reduction, result, a, b, count);
        case Dtype::boolean:
            return combine_as<std::uint8_t>(as_boolean(reduction), result, a, b, count);
    }
    throw std::invalid_argument("unknown dtype");
}

void divide(Dtype dtype, void* data, std::size_t count, std::uint32_t divisor) {
    switch (dtype) {
        case Dtype::float32:
            return divide_as<float>(data, count, divisor);
        case Dtype::float64:
            return divide_as<double>(data, count, divisor);
        case Dtype::bfloat16:
            return divide_as<Bfloat16>(data, count, divisor);
        case Dtype::float16:
            return divide_as<Float16>(data, count, divisor);
        case Dtype::int8:
            return divide_as<std::int8_t>(data, count, divisor);
        case Dtype::int32:
            return divide_as<std::int32_t>(data, count, divisor);
        case Dtype::int64:
            return divide_as<std::int64_t>(data, count, divisor);
        case Dtype::uint8:
            return divide_as<std::uint8_t>(data, count, divisor);
        case Dtype::boolean:
            break;
    }
    throw std::invalid_argument("there is no average of booleans");
}

void add_scaled(Dtype dtype, float* values, void* arrived, std::size_t count, float factor,
                bool last) {
    switch (dtype) {
        case Dtype::float32:
            return add_scaled_float32(values, static_cast<const float*>(arrived), count, factor);
        case Dtype::bfloat16: {
            auto* sums = static_cast<Bfloat16*>(arrived);
            return last ? keep_bfloat16(values, sums, count, factor)
                        : pass_on_bfloat16(values, sums, count, factor);
        }
        default:
            throw std::invalid_argument("rings send float32 or bfloat16");
    }
}

void scaled(const float* values, std::uint16_t* result, std::size_t count, float factor) {
    scaled_bfloat16(values, reinterpret_cast<Bfloat16*>(result), count, factor);
}

void narrowed(Dtype dtype, const float* values, std::uint16_t* result, std::size_t count) {
    const auto run = [&]<typename T>(T narrow_value, float largest) {
        for (std::size_t i = 0; i < count; ++i) {
            const float value =
                std::isnan(values[i]) ? values[i] : std::clamp(values[i], -largest, largest);
            narrow(value, narrow_value);
            result[i] = narrow_value.bits;
        }
    };
    switch (dtype) {
        case Dtype::bfloat16:
            return run(Bfloat16{}, 0x1.fep127F);
        case Dtype::float16:
            return run(Float16{}, 65504.0F);
        default:
            throw std::invalid_argument("values are narrowed to 16 bits");
    }
}

void widened(Dtype dtype, const std::uint16_t* values, float* result, std::size_t count) {
    switch (dtype) {
        case Dtype::bfloat16:
            for (std::size_t i = 0; i < count; ++i) result[i] = widened(Bfloat16{values[i]});
            return;
        case Dtype::float16:
            for (std::size_t i = 0; i < count; ++i) result[i] = widened(Float16{values[i]});
            return;
        default:
            throw std::invalid_argument("values are widened from 16 bits");
    }
}

}  // namespace syncline
