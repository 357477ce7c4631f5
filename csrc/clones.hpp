#pragma once

// The same loop, compiled for what the processor at hand has. Sanitizers start too late for the
// resolvers that choose.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SYNCLINE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SYNCLINE_CLONES
#endif

// What a clone calls is compiled with each of them.
#define SYNCLINE_INLINED [[gnu::always_inline]] inline
