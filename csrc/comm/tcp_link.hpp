// Two ranks on different hosts: fragments and notices as frames on one TCP connection.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "link.hpp"
#include "recycled.hpp"

namespace syncline {

class TcpLink;

// The sockets of a group's links. Used by one thread at a time.
class TcpTransport final : public Transport {
  public:
    // A link breaks if the peer's host is silent for so long. Throws std::system_error.
    explicit TcpTransport(std::chrono::milliseconds silence = std::chrono::seconds(25));
    TcpTransport(const TcpTransport&) = delete;
    TcpTransport& operator=(const TcpTransport&) = delete;
    ~TcpTransport() override;

    bool progress() override;
    // The descriptor of epoll. poll() on it returns when a socket has an event, and leaves the
    // event there.
    [[nodiscard]] int event() const override { return epoll_; }
    [[nodiscard]] bool arm() override;
    [[nodiscard]] bool is_flushed() const override;
    void close() override;

  private:
    friend class TcpLink;
    // Data to be reduced passes through here, so that it is reduced while it is in the cache.
    static constexpr std::size_t scratch_bytes = std::size_t{1} << 17;

    int epoll_;
    std::vector<TcpLink*> links_;
    std::chrono::milliseconds silence_;
    std::chrono::steady_clock::time_point looked_{};  // for links that fell silent
    RecycledVector<std::byte> scratch_;
};

// The link for messages between the two ranks, on the connection of their collectives.
class TcpMessages final : public Link {
  public:
    explicit TcpMessages(TcpLink& link) : link_(link) {}

    [[nodiscard]] std::size_t fragment_bytes() const override;
    [[nodiscard]] bool can_send() override;
    void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
              const std::optional<Copies>& copies) override;
    [[nodiscard]] std::uint64_t released() override;
    [[nodiscard]] bool can_receive() override;
    [[nodiscard]] bool has_arrived() override { return front() != nullptr; }
    [[nodiscard]] const Call* front() override;
    void receive(const Target& target, const Call& call) override;
    [[nodiscard]] std::uint64_t received() override;
    [[nodiscard]] const std::string& broken() const override;

  private:
    TcpLink& link_;
};

// A fragment is read from the socket directly to where it goes. One that comes before it is asked
// for is kept in memory, so that notices behind it get through. That memory is bounded by how far a
// rank may be ahead of its peer.
class TcpLink final : public Link {
  public:
    // Takes over a connected socket whose other end has proved to be the peer. Throws
    // std::system_error.
    TcpLink(std::shared_ptr<TcpTransport> transport, int socket, std::int32_t peer,
            std::size_t fragment_bytes);
    ~TcpLink() override;

    [[nodiscard]] std::size_t fragment_bytes() const override { return fragment_bytes_; }
    [[nodiscard]] bool can_send() override { return can_send(collectives_); }
    void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
              const std::optional<Copies>& copies) override;
    [[nodiscard]] std::uint64_t released() override { return released(collectives_); }
    [[nodiscard]] bool can_receive() override { return collectives_.receipts.size() < window; }
    [[nodiscard]] bool has_arrived() override { return front(collectives_) != nullptr; }
    void receive(const Target& target, const Call& call) override {
        receive(collectives_, target, call);
    }
    [[nodiscard]] std::uint64_t received() override { return received(collectives_); }
    [[nodiscard]] const std::string& broken() const override { return broken_; }
    [[nodiscard]] bool cut_off() const override { return !broken_.empty() && !left_; }
    [[nodiscard]] Link* messages() override { return &messages_link_; }
    void give_up(const Verdict& verdict) override;
    [[nodiscard]] std::optional<Verdict> given_up() override { return verdict_; }
    void end() override;
    [[nodiscard]] bool ended() override;

  private:
    friend class TcpMessages;
    friend class TcpTransport;

    // For each kind: fragments that wait to be written, and receives that wait for a fragment.
    static constexpr std::size_t window = 8;
    // For each kind, a rank is ahead of what its peer has acknowledged by at most this much.
    static constexpr std::size_t most_ahead_bytes = std::size_t{1} << 21;
    static constexpr std::size_t stage_bytes = 4096;
    static constexpr std::size_t largest_element_bytes = 16;

    enum class Kind : std::uint32_t {
        collective = 1,  // a fragment of one
        message,         // a fragment of one
        taken,           // acknowledges fragments
        given_up,
        left,
    };
    struct Header {
        Call call{};
        Kind kind{};
        std::uint32_t bytes = 0;           // that follow
        std::uint64_t taken = 0;           // fragments of collectives
        std::uint64_t taken_messages = 0;  // and of messages
        std::int32_t culprit = -1;         // as in Verdict
        Fault fault{};
    };
    static_assert(sizeof(Header) == 56);
    struct Frame {
        Header header;
        const std::byte* data;
        RecycledVector<std::byte> copy;  // of memory that may not be borrowed
    };
    // A fragment that arrived before it was asked for.
    struct Unexpected {
        Call call;
        RecycledVector<std::byte> data;
        bool complete = false;
    };
    struct Receipt {
        Target target;
        Call call;
    };
    // Fragments of one kind, in both directions.
    struct Lane {
        Kind kind;
        std::uint64_t sent = 0;
        std::uint64_t written = 0;  // to the socket
        std::uint64_t taken = 0;    // by the peer
        std::deque<Receipt> receipts{};
        std::deque<Unexpected> unexpected{};
        std::uint64_t arrived = 0;
        std::uint64_t received = 0;
        std::uint64_t acknowledged = 0;  // of those received
    };
    // Where what follows the header of a fragment goes.
    enum class Into : std::uint8_t {
        unknown,     // nobody has asked for it yet
        receipt,     // the first of the lane
        unexpected,  // the last of the lane
        nowhere,
    };

    [[nodiscard]] bool can_send(const Lane& lane) const;
    void send(Lane& lane, const std::byte* data, std::size_t bytes, const Call& call,
              bool may_borrow);
    [[nodiscard]] std::uint64_t released(const Lane& lane) const;
    [[nodiscard]] const Call* front(const Lane& lane) const;
    void receive(Lane& lane, const Target& target, const Call& call);
    std::uint64_t received(Lane& lane);

    // Returns whether anything moved. Throws PeerFailure.
    bool progress();
    bool read();
    // Take from the stage what is there.
    void consume();
    void begin(const Header& header);
    // Take so many bytes of the fragment from the stage.
    void deliver(const std::byte* data, std::size_t bytes);
    // So many of its bytes are in place or, for a reduction, in the scratch after the carried ones.
    void landed(std::size_t bytes);
    // Where its next bytes are read to.
    [[nodiscard]] iovec destination();
    // Move arrived fragments to the receives that ask for them.
    void match(Lane& lane);
    // Keep the fragment that nobody has asked for.
    void keep();
    void accept(const Header& header);
    bool write();
    void notify(Header header);
    void failed(int error);
    void fail();
    // Whether the peer's host has acknowledged nothing for too long; the link is then broken.
    bool fell_silent();
    [[noreturn]] void refuse(const std::string& expected, const std::string& found);
    [[nodiscard]] Lane& lane_of(Kind kind) {
        return kind == Kind::message ? messages_ : collectives_;
    }
    [[nodiscard]] bool reduces() const { return into_ == Into::receipt && target_.own != nullptr; }

    std::shared_ptr<TcpTransport> transport_;
    int socket_;
    std::int32_t peer_;
    std::size_t fragment_bytes_;
    std::uint64_t most_ahead_;
    std::string broken_;
    int error_ = 0;  // the first of the socket

    Lane collectives_{.kind = Kind::collective};
    Lane messages_{.kind = Kind::message};
    TcpMessages messages_link_{*this};

    bool readable_ = true;
    bool hung_up_ = false;  // the peer closed the connection, or it broke: read to the end
    bool writable_ = true;
    std::deque<Frame> out_;
    std::size_t written_ = 0;  // of the first of them, header included

    std::array<std::byte, stage_bytes> stage_{};
    std::size_t staged_from_ = 0;
    std::size_t staged_to_ = 0;
    std::optional<Header> frame_;  // under way
    Into into_ = Into::unknown;
    std::size_t done_ = 0;  // bytes of it
    Target target_{};
    std::array<std::byte, largest_element_bytes> carry_{};  // the start of an element
    std::size_t carried_ = 0;
    bool kept_back_ = false;  // nobody had asked for it at the last progress()

    std::optional<Verdict> verdict_;
    bool left_ = false;     // the peer has said that it leaves
    bool gave_up_ = false;  // this rank has reported a failure to the peer
    bool refused_ = false;  // nothing more is taken from the peer
    bool ending_ = false;
};

}  // namespace syncline
