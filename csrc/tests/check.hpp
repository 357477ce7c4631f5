// What a test checks, and how often that did not hold.
#pragma once

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <utility>

inline std::atomic<int> failed = 0;  // threads check too

// The condition comes last, so that it may hold commas.
#define CHECK(...)                                                                         \
    do {                                                                                   \
        if (!(__VA_ARGS__)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            ++failed;                                                                      \
        }                                                                                  \
    } while (false)

// Whether an argument is refused.
template <typename Call>
bool refused(Call&& call) {
    try {
        std::forward<Call>(call)();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}
