// Messages between two ranks on different hosts, over the connection that their collectives use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "link.hpp"
#include "recycled.hpp"
#include "ucx_library.hpp"

namespace syncline {

class UcxLink;

// Messages wait at the receiver until the program asks for them. So the bound on how many fragments
// a rank may be ahead of its peer counts them separately, or collectives would wait for them.
class UcxMessages final : public Link {
  public:
    explicit UcxMessages(UcxLink& link) : link_(link) {}

    [[nodiscard]] std::size_t fragment_bytes() const override;
    [[nodiscard]] bool can_send() override;
    void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
              const std::optional<Copies>& copies) override;
    [[nodiscard]] std::uint64_t released() override;
    [[nodiscard]] bool can_receive() override {
        return fetching_ == nullptr && !unexpected_.empty();
    }
    [[nodiscard]] bool has_arrived() override { return !unexpected_.empty(); }
    [[nodiscard]] const Call* front() override {
        return unexpected_.empty() ? nullptr : &unexpected_.front().call;
    }
    void receive(const Target& target, const Call& call) override;
    [[nodiscard]] std::uint64_t received() override;
    [[nodiscard]] const std::string& broken() const override;

    // UCX has a fragment of the peer.
    ucs_status_t arrive(const Call& call, void* data, std::size_t bytes, bool held);
    // The peer has acknowledged so many fragments; returns false if that is impossible.
    [[nodiscard]] bool acknowledge(std::uint64_t taken);
    [[nodiscard]] std::uint64_t sent() const { return sent_; }
    // How many have come that are not yet acknowledged to the peer.
    [[nodiscard]] std::uint64_t ahead() const {
        return received_ + unexpected_.size() - acknowledged_;
    }
    // For the end of the link: cancel what is in flight, wait until UCX has let go of it, and free
    // it.
    void cancel();
    [[nodiscard]] bool pending() const;
    void release();

  private:
    struct Sending {
        Call call;      // goes before the fragment
        void* request;  // null: complete
    };
    struct Unexpected {
        Call call;
        void* held;  // by UCX, which fetches it when it is asked to; or null
        RecycledVector<std::byte> copy;
        std::size_t bytes;
    };

    UcxLink& link_;
    std::deque<Sending> sends_;
    std::deque<Unexpected> unexpected_;
    void* fetching_ = nullptr;
    std::uint64_t sent_ = 0;
    std::uint64_t taken_ = 0;  // by the peer
    std::uint64_t received_ = 0;
    std::uint64_t acknowledged_ = 0;  // of those received
};

}  // namespace syncline
