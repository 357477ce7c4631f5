#include "stores.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace syncline {

namespace {

constexpr std::uint32_t shortest_interval = 16;
constexpr std::uint32_t longest_interval = 1024;  // 64 MiB of whole fragments

}  // namespace

void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
    constexpr std::size_t line = 64;
    const std::size_t head =
        std::min(bytes, (line - reinterpret_cast<std::uintptr_t>(to) % line) % line);
    std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + line <= bytes; at += line) {  // whole lines, each in one burst
        auto* out = reinterpret_cast<__m128i*>(to + at);
        const auto* in = reinterpret_cast<const __m128i*>(from + at);
        const __m128i a = _mm_loadu_si128(in);
        const __m128i b = _mm_loadu_si128(in + 1);
        const __m128i c = _mm_loadu_si128(in + 2);
        const __m128i d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    std::memcpy(to + at, from + at, bytes - at);
    _mm_sfence();  // they are not ordered with other stores
#else
    std::memcpy(to, from, bytes);
#endif
}

bool Stores::next() {
    tries_ = --left_ == 0;
    return past_ != tries_;
}

void Stores::learn(bool past, double s_per_byte) {
    double& known = s_per_byte_[past ? 1 : 0];
    // What is tried so seldom may have changed since; what is used is smoothed.
    known = tries_ || known == 0 ? s_per_byte : known + (s_per_byte - known) / 4;
    if (!tries_) return;
    const bool better = s_per_byte_[0] > worth_ * s_per_byte_[1];
    interval_ = better == past_ ? std::min(2 * interval_, longest_interval) : shortest_interval;
    past_ = better;
    left_ = interval_;
}

}  // namespace syncline
