// What joins two ranks: fragments in order, in each direction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "element.hpp"

namespace syncline {

// The `collective` of a message between two ranks that the program sends by itself. Larger values
// are messages, too: parts of a collective.
constexpr std::uint8_t exchange = 5;

// What a rank calls. Every fragment carries it, so that ranks that call different collectives fail
// instead of mixing up each other's bytes.
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
    const std::byte* own;  // combined with the received bytes; null: these are copied
    std::size_t bytes;
};

// What fragments for several peers have in common, if they are alike.
struct Copies {
    std::uint32_t transfer;  // the first of the collective with this content
    std::size_t offset;      // in it, in bytes
};

// What is wrong with a rank.
enum class Fault : std::uint32_t {
    lost,       // it, or the connection to it, has ended
    silent,     // it did not send, or take, what it should in time
    disagrees,  // it called something else
};

// A peer that has failed or called something else.
class PeerFailure : public std::runtime_error {
  public:
    PeerFailure(std::int32_t peer, Fault why, const std::string& what)
        : std::runtime_error(what), rank(peer), fault(why) {}
    std::int32_t rank;
    Fault fault;
};

// The error for data that no undamaged rank sends; says what was expected and what came.
[[nodiscard]] PeerFailure faulty(std::int32_t peer, const std::string& expected,
                                 const std::string& found);

// Why a rank has given up.
struct Verdict {
    std::int32_t culprit;  // the rank with the fault; -1: none
    Fault fault;
};

// Both directions between this rank and one peer. Used by one thread at a time. Whatever the peer
// sends is read once and checked; impossible values throw PeerFailure, here or in received().
class Link {
  public:
    Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;
    virtual ~Link() = default;

    // Transfers are cut into fragments of this size, at most, on both sides.
    [[nodiscard]] virtual std::size_t fragment_bytes() const = 0;

    [[nodiscard]] virtual bool can_send() = 0;
    // Send a fragment; its memory must not change until it is released, which is at once unless it
    // may be borrowed. `copies`: the same fragment goes to other peers.
    virtual void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
                      const std::optional<Copies>& copies) = 0;
    // How many of the fragments sent so far are released.
    [[nodiscard]] virtual std::uint64_t released() = 0;

    [[nodiscard]] virtual bool can_receive() = 0;
    // Whether a fragment has arrived that was not received yet.
    [[nodiscard]] virtual bool has_arrived() { return false; }
    // The peer's call of the next fragment that has arrived, as read once; null: none has, or it is
    // unknown.
    [[nodiscard]] virtual const Call* front() { return nullptr; }
    // Receive the next fragment, now or as soon as it arrives. Throws PeerFailure if the peer calls
    // something else.
    virtual void receive(const Target& target, const Call& call) = 0;
    // How many of the fragments received so far are in place.
    [[nodiscard]] virtual std::uint64_t received() = 0;

    // The link for messages between the two, beside the collectives of this one; null: none.
    [[nodiscard]] virtual Link* messages() { return nullptr; }

    // Why nothing more can be sent or received; empty while it can.
    [[nodiscard]] virtual const std::string& broken() const;

    // Whether it is broken although the peer has not said that it leaves.
    [[nodiscard]] virtual bool cut_off() const { return false; }

    // Notify the peer that this rank has given up, so that a rank that waits for this one, but not
    // for the culprit, can report the reason.
    virtual void give_up(const Verdict&) {}
    // The verdict of the peer, if it has given up.
    [[nodiscard]] virtual std::optional<Verdict> given_up() { return std::nullopt; }

    // Begin to end the link: from here on it takes nothing more from the peer.
    virtual void end() {}
    // Whether the link may be destroyed: the peer knows why this rank has given up, if it has.
    [[nodiscard]] virtual bool ended() { return true; }
};

// Moves fragments of several links, if these need progress.
class Transport {
  public:
    virtual ~Transport() = default;
    // Returns whether anything moved.
    virtual bool progress() = 0;
    // A descriptor that becomes readable when there is something to progress, once armed.
    [[nodiscard]] virtual int event() const = 0;
    // Returns false if there already is something.
    [[nodiscard]] virtual bool arm() = 0;
    // Whether it has passed on all that links have sent, or does that by itself.
    [[nodiscard]] virtual bool is_flushed() const { return true; }
    // Release everything, once no link uses it; nothing may be called afterwards.
    virtual void close() = 0;
};

// Whether any rank can call that: a peer may send anything.
[[nodiscard]] bool is_possible(const Call& call);
[[nodiscard]] std::size_t bytes_of(const Call& call);

// Throws PeerFailure unless the peer called the same, and sent as many bytes as that takes.
void require_same(std::int32_t peer, const Call& sent, std::size_t sent_bytes, const Call& call,
                  std::size_t bytes);

[[nodiscard]] std::string describe(const Call& call);
// Without count and number.
[[nodiscard]] std::string describe_kind(const Call& call);

}  // namespace syncline
