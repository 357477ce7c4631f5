// Messages between two ranks, beside the collectives and matched by their tags.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "link.hpp"
#include "recycled.hpp"
#include "task.hpp"

namespace syncline {

constexpr std::int32_t any_rank = -1;

// One message that this rank sends or receives.
class Message final : public Task {
  public:
    // `peer` is any_rank for a receive from whoever sends first. The tag is the call's sequence.
    Message(const Call& call, std::int32_t peer, const std::byte* source, std::byte* target)
        : call_(call), peer_(peer), source_(source), target_(target) {}

    [[nodiscard]] const Call& call() const override { return call_; }
    // Whom it goes to or comes from; any_rank until that is known.
    [[nodiscard]] std::int32_t peer() const { return peer_.load(std::memory_order_acquire); }

  private:
    friend class Mailbox;

    [[nodiscard]] std::size_t bytes() const { return call_.count * size_of(call_.dtype); }
    [[nodiscard]] bool accepts(std::int32_t from, const Call& call) const;

    Call call_;
    std::atomic<std::int32_t> peer_;
    const std::byte* source_;  // null for a receive
    std::byte* target_;
};

using MessageHandle = std::shared_ptr<Message>;

// A rank's messages to and from all others. Messages from one rank with one tag arrive in the order
// in which they were sent. If the program asks for another message first, those before it are set
// aside. A message that holds up no other stays in the link, so that a rank cannot fill another's
// memory. Used by one thread at a time.
class Mailbox {
  public:
    // links[r] carries messages to and from rank r; null where there are none.
    explicit Mailbox(std::vector<Link*> links);

    void send(const MessageHandle& message);
    // Throws PeerFailure if what arrived for it is something else.
    void receive(const MessageHandle& message);

    // Returns whether anything moved. Throws PeerFailure.
    bool progress();
    // Whether there is nothing to send or to receive.
    [[nodiscard]] bool idle() const { return open_ == 0; }
    // Whether a rank has sent something that nobody has taken.
    [[nodiscard]] bool has_arrived() const;
    // A message that will never be done if those ranks do nothing any more; null: none.
    [[nodiscard]] const Message* missing(const std::function<bool(std::int32_t)>& lost) const;
    // Stop accessing the memory of messages.
    void close();

  private:
    // A message that has arrived, or is arriving, before the program asks for it.
    struct Aside {
        Call call;
        RecycledVector<std::byte> data;
        bool complete = false;
        MessageHandle receiver;  // once the program asks for it
    };
    struct Piece {
        MessageHandle message;
        bool last;
    };
    // A message that is coming in, to its place or aside.
    struct Arrival {
        Call call;
        std::byte* target;
        std::size_t bytes;
        MessageHandle receiver;        // null: aside
        std::shared_ptr<Aside> aside;  // null: to its place
        std::size_t begun = 0;         // bytes
        bool last_begun = false;
    };
    struct Lane {
        Link* link = nullptr;
        std::deque<MessageHandle> sends;
        std::size_t offset = 0;  // of the first of them
        std::deque<Piece> under_way;
        std::uint64_t released = 0;
        std::optional<Arrival> arrival;
        std::uint64_t received = 0;  // fragments that were asked for
        std::deque<std::shared_ptr<Aside>> asides;
    };

    bool progress_sends(Lane& lane);
    bool progress_receives(std::int32_t rank, Lane& lane);
    [[nodiscard]] std::optional<Arrival> begin_arrival(std::int32_t rank, Lane& lane);
    void finish_arrival(std::int32_t rank, Lane& lane);
    void deliver(std::int32_t rank, const Aside& aside);
    void finish(Message& message);

    std::vector<Lane> lanes_;
    std::deque<MessageHandle> wanted_;  // receives for which nothing has arrived
    std::size_t open_ = 0;              // messages that are not done
};

}  // namespace syncline
