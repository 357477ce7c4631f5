// What joins two ranks: fragments in order, in each direction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "element.hpp"

namespace syncline {

// What a message between two ranks is called, which the program sends by itself. What is called
// otherwise from here on is a message, too: a part of a collective.
constexpr std::uint8_t exchange = 5;

// What a rank calls. Every fragment carries it, so that ranks that call different collectives say
// so instead of mixing up each other's bytes.
struct Call {
    std::uint64_t count;     // elements of the whole vector
    std::uint32_t sequence;  // number of the collective in its group; of an exchange, its tag
    std::uint32_t variant;   // root, algorithm and blocks, hashed by the caller
    std::uint8_t collective;
    Dtype dtype;
    Reduction reduction;
    std::uint8_t reserved;
    bool operator==(const Call&) const = default;
};
static_assert(sizeof(Call) == 24);

[[nodiscard]] constexpr bool is_message(const Call& call) { return call.collective >= exchange; }

// Where a fragment goes.
struct Target {
    std::byte* result;
    const std::byte* own;  // combined with what comes; null: what comes is copied
    std::size_t bytes;
};

// What fragments for several peers have in common, if they are alike.
struct Copies {
    std::uint32_t transfer;  // the first of the collective with this content
    std::size_t offset;      // in it, in bytes
};

// A peer that has failed or called something else.
class PeerFailure : public std::runtime_error {
  public:
    PeerFailure(std::int32_t peer, bool calls_differ, const std::string& what)
        : std::runtime_error(what), rank(peer), disagrees(calls_differ) {}
    std::int32_t rank;
    bool disagrees;
};

// Why a rank has given up.
struct Verdict {
    std::int32_t culprit;  // the rank that failed or called something else; -1: none
    bool disagrees;
};

// Both directions between this rank and one peer. Used by one thread at a time.
class Link {
  public:
    Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;
    virtual ~Link() = default;

    // Transfers are cut into fragments of this size, at most, on both sides.
    [[nodiscard]] virtual std::size_t fragment_bytes() const = 0;

    [[nodiscard]] virtual bool can_send() = 0;
    // Send a fragment; its memory must stay as it is until it is released. Unless it may be
    // borrowed, that is at once. `copies` where the same goes to other peers.
    virtual void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
                      const std::optional<Copies>& copies) = 0;
    // How many of the fragments sent so far are released.
    [[nodiscard]] virtual std::uint64_t released() = 0;

    [[nodiscard]] virtual bool can_receive() = 0;
    // Whether a fragment has come that nobody has taken yet.
    [[nodiscard]] virtual bool has_come() { return false; }
    // What the peer calls with the next fragment that has come; null: none has, or the link cannot
    // tell.
    [[nodiscard]] virtual const Call* front() { return nullptr; }
    // Take the next fragment, now or as soon as it comes. Throws PeerFailure if the peer calls
    // something else.
    virtual void receive(const Target& target, const Call& call) = 0;
    // How many of the fragments taken so far are where they should be.
    [[nodiscard]] virtual std::uint64_t received() = 0;

    // What carries messages between the two, beside the collectives that this carries; null:
    // nothing.
    [[nodiscard]] virtual Link* messages() { return nullptr; }

    // Why nothing more will come or go; empty as long as that is not so.
    [[nodiscard]] virtual const std::string& broken() const;

    // Tell the peer that this rank takes part no more, so that the peer can say so who waits for it
    // but never for the culprit.
    virtual void give_up(const Verdict&) {}
    // What the peer has told so, if it has.
    [[nodiscard]] virtual std::optional<Verdict> given_up() { return std::nullopt; }
};

// What moves fragments of several links, where they do not move by themselves.
class Transport {
  public:
    virtual ~Transport() = default;
    // Returns whether anything moved.
    virtual bool progress() = 0;
};

[[nodiscard]] std::string describe(const Call& call);
// Without count and number.
[[nodiscard]] std::string describe_kind(const Call& call);

}  // namespace syncline
