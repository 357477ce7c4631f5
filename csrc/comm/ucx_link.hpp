// Two ranks on different hosts: fragments as active messages of UCX, notices as tagged messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "link.hpp"
#include "recycled.hpp"
#include "sleeper.hpp"
#include "ucx_library.hpp"
#include "ucx_messages.hpp"

namespace syncline {

// UCX's context and worker of a group. Used by one thread at a time.
class UcxWorker final : public Transport {
  public:
    using Settings = std::vector<std::pair<std::string, std::string>>;

    // `settings` as UCX calls them, without the prefix UCX_. Throws std::runtime_error.
    UcxWorker(const UcxLibrary& library, const Settings& settings);
    UcxWorker(const UcxWorker&) = delete;
    UcxWorker& operator=(const UcxWorker&) = delete;
    ~UcxWorker() override;

    [[nodiscard]] const UcxLibrary& library() const { return ucx_; }
    [[nodiscard]] ucp_worker_h handle() const { return worker_; }
    // For peers, to reach this worker.
    [[nodiscard]] std::string address() const;
    // Throws what a callback has thrown: no exception may pass through UCX, which is C.
    bool progress() override {
        const bool moved = ucx_.worker_progress(worker_) != 0;
        if (caught_) std::rethrow_exception(std::exchange(caught_, nullptr));
        return moved;
    }
    // Called in a callback that handles an exception: keep it for progress().
    void keep_exception() {
        if (!caught_) caught_ = std::current_exception();
    }
    void close() override;
    [[nodiscard]] int event() const override { return event_; }
    [[nodiscard]] bool arm() override;
    // Block until there is something to progress, or the time is over.
    void sleep(std::chrono::milliseconds longest);

  private:
    const UcxLibrary& ucx_;
    ucp_context_h context_ = nullptr;
    ucp_worker_h worker_ = nullptr;
    int event_ = -1;
    std::exception_ptr caught_;
};

class UcxLink final : public Link {
  public:
    // Throws std::runtime_error if the address cannot be used.
    UcxLink(std::shared_ptr<UcxWorker> worker, const std::string& address, std::int32_t rank,
            std::int32_t peer, std::size_t fragment_bytes, std::uint32_t window);
    ~UcxLink() override;

    [[nodiscard]] std::size_t fragment_bytes() const override { return fragment_bytes_; }
    [[nodiscard]] bool can_send() override;
    void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
              const std::optional<Copies>& copies) override;
    [[nodiscard]] std::uint64_t released() override;
    [[nodiscard]] bool can_receive() override;
    [[nodiscard]] bool has_arrived() override { return !unexpected_.empty(); }
    void receive(const Target& target, const Call& call) override;
    [[nodiscard]] std::uint64_t received() override;
    [[nodiscard]] const std::string& broken() const override { return broken_; }
    [[nodiscard]] bool cut_off() const override { return !broken_.empty() && !left_; }
    [[nodiscard]] Link* messages() override { return &messages_; }
    // Whether each of the two can reach the other, and knows that the other can. From then on each
    // notices when the other ends, even if neither has sent anything, and a send of one needs no
    // progress of the other.
    [[nodiscard]] bool connected();
    void give_up(const Verdict& verdict) override;
    [[nodiscard]] std::optional<Verdict> given_up() override;
    void end() override;
    [[nodiscard]] bool ended() override;

  private:
    friend class UcxMessages;

    // UCX keeps small messages, and fragments over TCP, in memory until they are received. So a
    // rank is ahead of its peer by at most this many, and the peer acknowledges every few of them.
    static constexpr std::uint64_t most_ahead = 32;
    static constexpr std::uint64_t acknowledged_at_once = most_ahead / 4;

    struct Sending {
        Call call;                       // goes before the fragment
        void* request;                   // null: complete
        RecycledVector<std::byte> copy;  // of memory that may not be borrowed
    };
    // A fragment that has arrived before it is received.
    struct Unexpected {
        Call call;
        std::size_t bytes;
        void* held;                      // by UCX, which fetches it on request; or null
        RecycledVector<std::byte> copy;  // otherwise
    };
    struct Receipt {
        Target target;
        Call call;
        std::size_t slot;  // of scratch memory
        void* fetching = nullptr;
        bool landed = false;
    };

    // What ranks send to each other besides fragments. No word is 0, since a notice that is too
    // short leaves a 0.
    enum class Word : std::uint32_t {
        ready = 1,  // the sender sees the two connected
        taken,      // acknowledges fragments
        given_up,
        left,
    };
    struct Notice {
        Word word{};
        std::int32_t culprit = -1;  // as in Verdict
        Fault fault{};
        std::uint32_t reserved = 0;
        std::uint64_t taken = 0;           // fragments of collectives
        std::uint64_t taken_messages = 0;  // and of messages
    };
    struct Notification {
        std::unique_ptr<Notice> notice;  // which UCX is still reading; null: a greeting
        void* request;
    };

    // Make UCX connect the two.
    void greet();
    void notify(const Notice& notice);
    [[nodiscard]] bool pending(void* request) const;
    void receive_notice();
    // Read the peer's notices.
    void poll_notices();
    void accept(const Notice& notice);
    // The peer has sent something impossible: take nothing more. received() throws the error.
    void refuse(const std::string& expected, const std::string& found);
    void reap();
    // Let UCX deliver the peer's fragments, or stop it.
    void handle(bool on);
    // UCX has something of the peer, which may be a fragment.
    ucs_status_t arrive(const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                        bool held);
    ucs_status_t arrive(const Call& call, void* data, std::size_t bytes, bool held);
    // Put arrived fragments where they are awaited.
    void match();
    // Whether the peer called the same; otherwise received() throws.
    bool fits(const Receipt& receipt, const Call& call, std::size_t bytes);
    void land(Receipt& receipt, const std::byte* data);
    std::byte* scratch(const Receipt& receipt);
    void fail(ucs_status_t status);

    std::shared_ptr<UcxWorker> worker_;
    const UcxLibrary& ucx_;
    std::int32_t rank_;
    std::int32_t peer_;
    std::size_t fragment_bytes_;
    std::uint32_t window_;
    ucp_ep_h endpoint_ = nullptr;
    std::string broken_;

    std::deque<Notification> notifications_;
    Notice notice_{};
    void* receiving_notice_ = nullptr;  // null: for nothing more
    std::optional<Verdict> verdict_;
    void* connecting_ = nullptr;  // null: connected
    bool ready_ = false;          // said so
    bool greeted_ = false;        // the peer has said so
    bool left_ = false;           // the peer has said that it leaves
    bool gave_up_ = false;        // this rank has reported a failure to the peer
    bool ending_ = false;         // this link takes no more fragments
    bool closing_ = false;        // and no more notices

    std::deque<Sending> sends_;
    std::uint64_t sent_ = 0;
    std::uint64_t taken_ = 0;  // by the peer, as it has acknowledged
    std::deque<Unexpected> unexpected_;
    std::deque<Receipt> receipts_;
    std::size_t matched_ = 0;  // how many of them, from the first, have their fragment
    std::optional<PeerFailure> refusal_;
    std::uint64_t arrived_ = 0;
    std::uint64_t posted_ = 0;
    std::uint64_t received_ = 0;
    std::uint64_t acknowledged_ = 0;     // of those received
    RecycledVector<std::byte> scratch_;  // where UCX fetches data to be reduced
    UcxMessages messages_{*this};
};

}  // namespace syncline
