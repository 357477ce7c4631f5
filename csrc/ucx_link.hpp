// Two ranks on different hosts: fragments as active messages of UCX, words as tagged ones.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "group.hpp"
#include "link.hpp"
#include "recycled.hpp"
#include "ucx_library.hpp"
#include "ucx_messages.hpp"

namespace syncline {

// What UCX needs to know once for a group. Used by one thread at a time.
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
    bool progress() override { return ucx_.worker_progress(worker_) != 0; }
    // Give back all that it has, once no link uses it any more; nothing may be called afterwards.
    void close();
    // Becomes readable when there is something to progress, once armed.
    [[nodiscard]] int event() const { return event_; }
    // Returns false if there already is something.
    [[nodiscard]] bool arm();
    // Sleep until there is something to progress, or the time is over.
    void sleep(std::chrono::milliseconds longest);

  private:
    const UcxLibrary& ucx_;
    ucp_context_h context_ = nullptr;
    ucp_worker_h worker_ = nullptr;
    int event_ = -1;
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
    [[nodiscard]] bool has_come() override { return !come_.empty(); }
    void receive(const Target& target, const Call& call) override;
    [[nodiscard]] std::uint64_t received() override;
    [[nodiscard]] const std::string& broken() const override { return broken_; }
    [[nodiscard]] Link* messages() override { return &messages_; }
    // Whether each of the two can reach the other, and knows that the other can. From then on each
    // notices when the other ends, also if neither has sent anything, and what one sends needs no
    // help of the other to leave.
    [[nodiscard]] bool connected();
    void give_up(const Verdict& verdict) override;
    [[nodiscard]] std::optional<Verdict> given_up() override;

  private:
    friend class UcxMessages;

    // Small messages, and over TCP fragments, UCX keeps in memory until somebody takes them. So a
    // rank sends no more ahead of its peer than this many, and a peer says every so often how many
    // it took.
    static constexpr std::uint64_t most_ahead = 32;
    static constexpr std::uint64_t taken_at_once = most_ahead / 4;

    struct Sending {
        Call call;                       // goes before the fragment
        void* request;                   // null: complete
        RecycledVector<std::byte> copy;  // of what may not be borrowed
    };
    // A fragment that has come before anybody takes it.
    struct Come {
        Call call;
        std::size_t bytes;
        void* held;                      // by UCX, which fetches it when it is asked to; or null
        RecycledVector<std::byte> copy;  // otherwise
    };
    struct Receipt {
        Target target;
        Call call;
        std::size_t slot;  // of scratch memory
        void* fetching = nullptr;
        bool landed = false;
    };

    // What ranks say to each other beside their fragments.
    enum class Word : std::int32_t {
        ready,  // the two are connected, as the one who says it sees it
        taken,  // so many fragments
        given_up,
        left,
    };
    struct Notice {
        Word word;
        Verdict verdict{-1, false};
        std::uint64_t taken = 0;           // fragments of collectives
        std::uint64_t taken_messages = 0;  // and of messages
    };
    struct Saying {
        std::unique_ptr<Notice> notice;  // which UCX is still reading; null: a greeting
        void* request;
    };

    // Make UCX connect the two.
    void greet();
    void say(const Notice& notice);
    [[nodiscard]] bool pending(void* request) const;
    void listen();
    // Take in what the peer has said.
    void hear();
    void reap();
    // Have UCX hand over the peer's fragments, or no more.
    void handle(bool on);
    // UCX has a fragment of the peer.
    ucs_status_t come(const Call& call, void* data, std::size_t bytes, bool held);
    // Put what has come where it is awaited.
    void match();
    // Whether the peer called the same; what it called is kept otherwise.
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

    std::deque<Saying> saying_;
    Notice heard_{};
    void* listening_ = nullptr;  // null: for nothing more
    std::optional<Verdict> verdict_;
    void* connecting_ = nullptr;  // null: connected
    bool ready_ = false;          // said so
    bool greeted_ = false;        // the peer has said so
    bool left_ = false;           // the peer has
    bool ending_ = false;         // this link
    bool gave_up_ = false;        // this rank

    std::deque<Sending> sends_;
    std::uint64_t sent_ = 0;
    std::uint64_t taken_ = 0;  // by the peer, as it has said
    std::deque<Come> come_;
    std::deque<Receipt> receipts_;
    std::size_t matched_ = 0;  // so many of them, the first ones, have their fragment
    std::optional<PeerFailure> disagreement_;
    std::uint64_t posted_ = 0;
    std::uint64_t received_ = 0;
    std::uint64_t told_ = 0;             // of those received
    RecycledVector<std::byte> scratch_;  // where UCX fetches what is combined then
    UcxMessages messages_{*this};
};

// Sleeps until UCX, or a peer on this host, has news.
class UcxSleeper final : public Sleeper {
  public:
    // `bell` rings where ranks of this host do something; null where there are none. `event` is an
    // eventfd that they, and wake(), write to.
    UcxSleeper(std::shared_ptr<UcxWorker> worker, Doorbell* bell, int event);

    void announce() override;
    void withdraw() override;
    bool may_sleep() override { return worker_->arm(); }
    void sleep(Clock::time_point deadline) override;
    void wake() override;

  private:
    std::shared_ptr<UcxWorker> worker_;
    Doorbell* bell_;
    int event_;
};

}  // namespace syncline
