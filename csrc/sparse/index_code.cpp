#include "index_code.hpp"

#include <algorithm>
#include <stdexcept>

namespace syncline {

namespace {

constexpr std::uint32_t escape = 0xffffU;

void put(RecycledVector<std::byte>& bytes, std::uint32_t value, int width) {
    for (int i = 0; i < width; ++i) {
        bytes.push_back(static_cast<std::byte>((value >> (8 * i)) & 0xffU));
    }
}

std::uint32_t get(std::span<const std::byte> bytes, std::size_t at, std::size_t width) {
    if (bytes.size() < at + width) throw std::invalid_argument("the indices end early");
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < width; ++i) {
        value |= static_cast<std::uint32_t>(bytes[at + i]) << (8 * i);
    }
    return value;
}

}  // namespace

std::size_t longest_code(std::size_t count, std::size_t universe) {
    return 2 * count + 4 * std::min(count, universe / (escape + 1));
}

RecycledVector<std::byte> coded(std::span<const std::uint32_t> indices) {
    RecycledVector<std::byte> bytes;
    bytes.reserve(2 * indices.size() + 64);
    std::uint32_t next = 0;  // the lowest index that may come
    for (const std::uint32_t index : indices) {
        const std::uint32_t skipped = index - next;
        if (skipped < escape) {
            put(bytes, skipped, 2);
        } else {
            put(bytes, escape, 2);
            put(bytes, skipped, 4);
        }
        next = index + 1;
    }
    return bytes;
}

std::size_t decode(std::span<const std::byte> bytes, std::size_t universe,
                   std::span<std::uint32_t> indices) {
    std::size_t at = 0;
    std::uint64_t next = 0;
    for (std::uint32_t& index : indices) {
        std::uint64_t skipped = get(bytes, at, 2);
        at += 2;
        if (skipped == escape) {
            skipped = get(bytes, at, 4);
            at += 4;
            if (skipped < escape) throw std::invalid_argument("a distance is coded too long");
        }
        next += skipped;
        if (next >= universe) throw std::invalid_argument("an index is beyond the vector");
        index = static_cast<std::uint32_t>(next);
        ++next;
    }
    return at;
}

}  // namespace syncline
