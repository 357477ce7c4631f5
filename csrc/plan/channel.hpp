// The timing of messages on one communication channel, as max-plus algebra.
#pragma once

#include <algorithm>
#include <cstdint>

namespace syncline {

// Far below every time, and far enough from the end of 64 bits to add to.
inline constexpr std::int64_t never = std::int64_t{-1} << 61;

// A message as the channel sees it.
struct Transfer {
    std::int64_t ready_ns;         // when its last gradient is ready
    std::int64_t transmission_ns;  // T(M) - T(0); the latency phase before it takes T(0)
    std::int64_t tail_ns;          // what still runs after it has arrived
};

// The channel after some messages, with one or two in flight.
//
// With c in flight, the latency of message i begins once it is ready, that of message i - 1 has
// begun and message i - c has arrived; it takes T(0). Transmissions are made one at a time, in
// order. So two numbers hold all that matters of the past.
struct Channel {
    std::int64_t latency_free_ns = 0;       // when the next latency may begin
    std::int64_t transmission_free_ns = 0;  // when the last message has arrived

    // Returns when the message arrives, and moves on past it.
    std::int64_t send(const Transfer& message, std::int64_t latency_ns, bool overlap) {
        const std::int64_t begun = std::max(message.ready_ns, latency_free_ns);
        const std::int64_t arrived =
            std::max(begun + latency_ns, transmission_free_ns) + message.transmission_ns;
        latency_free_ns = overlap ? std::max(begun, transmission_free_ns) : arrived;
        transmission_free_ns = arrived;
        return arrived;
    }
};

// max over the messages of a sequence of (arrival + tail), as a function of the channel before it:
//
//   max(latency_free + after_latency, transmission_free + after_transmission, least)
//
// Prepending a message to such a sequence updates the function in O(1). With the function for every
// suffix and the channel for every prefix, a change of a few messages is judged in time
// proportional to their number.
struct Outlook {
    std::int64_t after_latency_ns = never;
    std::int64_t after_transmission_ns = never;
    std::int64_t least_ns = never;

    [[nodiscard]] std::int64_t operator()(const Channel& channel) const {
        return std::max({channel.latency_free_ns + after_latency_ns,
                         channel.transmission_free_ns + after_transmission_ns, least_ns});
    }

    // The outlook before `message`, where this is the one after it.
    [[nodiscard]] Outlook before(const Transfer& message, std::int64_t latency_ns,
                                 bool overlap) const {
        // With one in flight, the next latency waits for this arrival as well.
        const std::int64_t after_arrival =
            std::max({message.tail_ns, after_transmission_ns, overlap ? never : after_latency_ns});
        const std::int64_t after_start = after_arrival + message.transmission_ns;
        // With two, it may begin when this one's has begun and the message before has arrived.
        const std::int64_t next_latency = overlap ? after_latency_ns : never;
        return {std::max(after_start + latency_ns, next_latency),
                std::max(after_start, next_latency),
                std::max({message.ready_ns + latency_ns + after_start,
                          message.ready_ns + next_latency, least_ns})};
    }
};

}  // namespace syncline
