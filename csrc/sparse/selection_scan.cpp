#include "selection_scan.hpp"

#include <algorithm>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace syncline {

namespace {

enum class Update : std::uint8_t { none, gradient, momentum };

template <Update update>
float updated(const Streams& streams, std::size_t i) {
    if constexpr (update == Update::none) {
        return streams.values[i];
    } else if constexpr (update == Update::gradient) {
        return streams.values[i] += streams.gradient[i];
    } else {
        const float velocity = streams.momentum * streams.velocity[i] + streams.gradient[i];
        streams.velocity[i] = velocity;
        return streams.values[i] += velocity;
    }
}

void append(Candidates& candidates, float value, std::size_t index) {
    candidates.values[candidates.count] = value;
    candidates.indices[candidates.count] = static_cast<std::uint32_t>(index);
    ++candidates.count;
}

template <Update update>
void scan_portable(const Streams& streams, std::size_t start, std::size_t stop,
                   std::uint32_t threshold, Candidates& candidates) {
    for (std::size_t i = start; i < stop; ++i) {
        const float value = updated<update>(streams, i);
        if (magnitude_of(value) > threshold) append(candidates, value, streams.first + i);
    }
}

std::size_t not_finite_portable(const float* values, std::size_t start, std::size_t stop) {
    for (std::size_t i = start; i < stop; ++i) {
        if (magnitude_of(values[i]) >= infinite_magnitude) return i;
    }
    return stop;
}

#if defined(__x86_64__)

// Four vectors at a time, so that one rarely taken branch stands for all of them.
constexpr std::size_t unrolled = 4;

#define SYNCLINE_AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define SYNCLINE_AVX512 __attribute__((target("avx512f,avx2,bmi,popcnt")))

template <Update update>
SYNCLINE_AVX2 inline __m256 updated_avx2(const Streams& streams, std::size_t i) {
    const __m256 old = _mm256_loadu_ps(streams.values + i);
    if constexpr (update == Update::none) {
        return old;
    } else {
        __m256 added = _mm256_loadu_ps(streams.gradient + i);
        if constexpr (update == Update::momentum) {
            const __m256 before = _mm256_loadu_ps(streams.velocity + i);
            added = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(streams.momentum), before), added);
            _mm256_storeu_ps(streams.velocity + i, added);
        }
        const __m256 sum = _mm256_add_ps(old, added);
        _mm256_storeu_ps(streams.values + i, sum);
        return sum;
    }
}

template <Update update>
SYNCLINE_AVX2 void scan_avx2(const Streams& streams, std::size_t start, std::size_t stop,
                             std::uint32_t threshold, Candidates& candidates) {
    constexpr std::size_t lanes = 8;
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(threshold));
    const __m256i unsigned_bits = _mm256_set1_epi32(0x7fffffff);
    std::size_t i = start;
    for (; i + unrolled * lanes <= stop; i += unrolled * lanes) {
        __m256 values[unrolled];
        __m256i above[unrolled];
        for (std::size_t j = 0; j < unrolled; ++j) {
            values[j] = updated_avx2<update>(streams, i + j * lanes);
            const __m256i bits = _mm256_and_si256(_mm256_castps_si256(values[j]), unsigned_bits);
            above[j] = _mm256_cmpgt_epi32(bits, limit);
        }
        const __m256i any = _mm256_or_si256(_mm256_or_si256(above[0], above[1]),
                                            _mm256_or_si256(above[2], above[3]));
        if (_mm256_testz_si256(any, any) != 0) continue;
        for (std::size_t j = 0; j < unrolled; ++j) {
            auto mask =
                static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(above[j])));
            if (mask == 0) continue;
            alignas(32) float lane[lanes];
            _mm256_store_ps(lane, values[j]);
            for (; mask != 0; mask &= mask - 1) {
                const auto at = static_cast<std::size_t>(std::countr_zero(mask));
                append(candidates, lane[at], streams.first + i + j * lanes + at);
            }
        }
    }
    scan_portable<update>(streams, i, stop, threshold, candidates);
}

SYNCLINE_AVX2 std::size_t not_finite_avx2(const float* values, std::size_t count) {
    constexpr std::size_t lanes = 8;
    const __m256i exponent = _mm256_set1_epi32(static_cast<int>(infinite_magnitude));
    std::size_t i = 0;
    for (; i + unrolled * lanes <= count; i += unrolled * lanes) {
        __m256i any = _mm256_setzero_si256();
        for (std::size_t j = 0; j < unrolled; ++j) {
            const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(values + i + j * lanes));
            any = _mm256_or_si256(any,
                                  _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent));
        }
        if (_mm256_testz_si256(any, any) == 0) break;
    }
    return not_finite_portable(values, i, count);
}

template <Update update>
SYNCLINE_AVX512 inline __m512 updated_avx512(const Streams& streams, std::size_t i) {
    const __m512 old = _mm512_loadu_ps(streams.values + i);
    if constexpr (update == Update::none) {
        return old;
    } else {
        __m512 added = _mm512_loadu_ps(streams.gradient + i);
        if constexpr (update == Update::momentum) {
            const __m512 before = _mm512_loadu_ps(streams.velocity + i);
            added = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(streams.momentum), before), added);
            _mm512_storeu_ps(streams.velocity + i, added);
        }
        const __m512 sum = _mm512_add_ps(old, added);
        _mm512_storeu_ps(streams.values + i, sum);
        return sum;
    }
}

template <Update update>
SYNCLINE_AVX512 void scan_avx512(const Streams& streams, std::size_t start, std::size_t stop,
                                 std::uint32_t threshold, Candidates& candidates) {
    constexpr std::size_t lanes = 16;
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
    const __m512i unsigned_bits = _mm512_set1_epi32(0x7fffffff);
    const __m512i ramp = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    std::size_t i = start;
    for (; i + unrolled * lanes <= stop; i += unrolled * lanes) {
        __m512 values[unrolled];
        __mmask16 above[unrolled];
        for (std::size_t j = 0; j < unrolled; ++j) {
            values[j] = updated_avx512<update>(streams, i + j * lanes);
            const __m512i bits = _mm512_and_epi32(_mm512_castps_si512(values[j]), unsigned_bits);
            above[j] = _mm512_cmpgt_epi32_mask(bits, limit);
        }
        if ((above[0] | above[1] | above[2] | above[3]) == 0) continue;
        for (std::size_t j = 0; j < unrolled; ++j) {
            if (above[j] == 0) continue;
            const __m512i indices = _mm512_add_epi32(
                _mm512_set1_epi32(static_cast<int>(streams.first + i + j * lanes)), ramp);
            // Compressed in the register: compressing stores take Zen 4 a hundred cycles.
            _mm512_storeu_ps(candidates.values + candidates.count,
                             _mm512_maskz_compress_ps(above[j], values[j]));
            _mm512_storeu_si512(candidates.indices + candidates.count,
                                _mm512_maskz_compress_epi32(above[j], indices));
            candidates.count +=
                static_cast<std::size_t>(std::popcount(static_cast<std::uint32_t>(above[j])));
        }
    }
    scan_portable<update>(streams, i, stop, threshold, candidates);
}

SYNCLINE_AVX512 std::size_t not_finite_avx512(const float* values, std::size_t count) {
    constexpr std::size_t lanes = 16;
    const __m512i exponent = _mm512_set1_epi32(static_cast<int>(infinite_magnitude));
    std::size_t i = 0;
    for (; i + unrolled * lanes <= count; i += unrolled * lanes) {
        std::uint32_t any = 0;
        for (std::size_t j = 0; j < unrolled; ++j) {
            const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(values + i + j * lanes));
            any |= _mm512_cmpeq_epi32_mask(_mm512_and_epi32(bits, exponent), exponent);
        }
        if (any != 0) break;
    }
    return not_finite_portable(values, i, count);
}

#endif

template <Update update>
Scan scan_of(Instructions instructions) {
#if defined(__x86_64__)
    if (instructions == Instructions::avx512) return &scan_avx512<update>;
    if (instructions == Instructions::avx2) return &scan_avx2<update>;
#endif
    static_cast<void>(instructions);
    return &scan_portable<update>;
}

void require(Instructions instructions) {
    if (!has_instructions(instructions)) {
        throw std::invalid_argument("this processor lacks these vector instructions");
    }
}

}  // namespace

bool has_instructions(Instructions instructions) {
    if (instructions == Instructions::portable) return true;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("popcnt");
    if (instructions == Instructions::avx2) return avx2;
    if (instructions == Instructions::avx512) return avx2 && __builtin_cpu_supports("avx512f");
#endif
    return false;
}

Instructions widest_instructions() {
    for (const auto each : {Instructions::avx512, Instructions::avx2}) {
        if (has_instructions(each)) return each;
    }
    return Instructions::portable;
}

Scan scan_with(Instructions instructions, const Streams& streams) {
    require(instructions);
    if (streams.gradient == nullptr) return scan_of<Update::none>(instructions);
    if (streams.velocity == nullptr) return scan_of<Update::gradient>(instructions);
    return scan_of<Update::momentum>(instructions);
}

std::size_t first_not_finite(const float* values, std::size_t count, Instructions instructions) {
    require(instructions);
#if defined(__x86_64__)
    if (instructions == Instructions::avx512) return not_finite_avx512(values, count);
    if (instructions == Instructions::avx2) return not_finite_avx2(values, count);
#endif
    return not_finite_portable(values, 0, count);
}

}  // namespace syncline
