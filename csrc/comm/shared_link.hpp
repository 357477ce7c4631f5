// Two ranks on one host: fragments through memory that both have mapped.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "doorbell.hpp"
#include "link.hpp"
#include "slots.hpp"
#include "stores.hpp"

namespace syncline {

// Memory behind a file descriptor, mapped for reading and writing, shared with other processes.
class SharedMemory {
  public:
    // Throws std::system_error, and std::length_error if it is smaller, or another process can
    // shrink it: an access would then kill this process.
    SharedMemory(int descriptor, std::size_t bytes);
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    ~SharedMemory();

    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

  private:
    std::byte* data_;
    std::size_t bytes_;
};

// What the ranks of a host need to exchange: one segment a rank, written by it. First its bell,
// then a channel to each peer, then the slots.
struct SegmentLayout {
    std::int32_t peers;          // ranks on the host, the owner included
    std::size_t fragment_bytes;  // a multiple of 4096
    std::uint32_t window;        // fragments in flight from one rank to another

    [[nodiscard]] std::size_t bytes() const;
    [[nodiscard]] std::size_t channel_offset(std::int32_t to) const;
    [[nodiscard]] std::uint32_t slots() const;
    [[nodiscard]] std::size_t slots_offset() const;
};

class SharedLink final : public Link {
  public:
    // `own` and `theirs` are the segments of this rank and of the peer. Places are positions among
    // the ranks of the host. `slots` are those of this rank, for all of its links. `event` is the
    // peer's eventfd, or -1 if it never waits for one. `start` is where the layout begins in both.
    SharedLink(const SegmentLayout& layout, std::shared_ptr<SharedMemory> own,
               std::shared_ptr<SharedMemory> theirs, std::int32_t own_place,
               std::int32_t their_place, std::shared_ptr<Slots> slots, std::int32_t peer, int event,
               std::size_t start = 0);

    // Let another link between the two, in other parts of the segments, carry messages.
    void carry_messages(std::unique_ptr<Link> messages) { messages_ = std::move(messages); }

    [[nodiscard]] std::size_t fragment_bytes() const override { return fragment_bytes_; }
    [[nodiscard]] bool can_send() override;
    void send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
              const std::optional<Copies>& copies) override;
    [[nodiscard]] std::uint64_t released() override { return sent_; }
    [[nodiscard]] bool can_receive() override;
    [[nodiscard]] bool has_arrived() override { return can_receive(); }
    [[nodiscard]] const Call* front() override;
    [[nodiscard]] Link* messages() override { return messages_.get(); }
    void receive(const Target& target, const Call& call) override;
    [[nodiscard]] std::uint64_t received() override { return received_; }
    void give_up(const Verdict& verdict) override;
    [[nodiscard]] std::optional<Verdict> given_up() override;

    // The bell that wakes the owner of a segment.
    [[nodiscard]] static Doorbell& bell_of(const SharedMemory& segment);

  private:
    // As measured: if the ranks share a cache, a slot that was written past it is read at half the
    // speed.
    static constexpr double slots_worth = 4;
    static constexpr double results_worth = 1.5;

    // Together with its description, this fills five lines. As measured, they are fetched sooner
    // than one line and a slot.
    static constexpr std::size_t small_bytes = 272;

    // The description of a fragment.
    struct Said {
        Call call;
        std::uint64_t bytes;
        std::uint64_t slot;  // 0 if it is small: then it lies beside this
    };
    using SaidWords = std::array<std::uint64_t, sizeof(Said) / sizeof(std::uint64_t)>;
    // The description in one line, so that whoever sees it arrive has all of it. A small fragment's
    // content is in the lines after it.
    struct Fragment {
        std::atomic<std::uint64_t> number;  // of the fragment that lies here, from 1; written last
        SaidWords said;
        std::byte small[small_bytes];
    };
    static_assert(sizeof(Fragment) == 320);
    struct Channel {
        alignas(64) std::atomic<std::uint32_t> verdict;  // 0: none; see given_up()
        alignas(64) std::atomic<std::uint64_t> taken;
    };

    [[nodiscard]] static Channel& channel(const SharedMemory& segment, std::size_t offset);
    [[nodiscard]] Fragment& fragment(std::byte* base, std::uint64_t number) const;
    [[nodiscard]] std::uint32_t put(const std::byte* data, std::size_t bytes, const Call& call,
                                    const std::optional<Copies>& copies);
    // The description of the next fragment, which has arrived. Its words are read once: the peer
    // may change them at any moment.
    [[nodiscard]] const Said& said();
    // See what the peer has taken.
    void look();

    // Where the content of the next fragment lies.
    [[nodiscard]] const std::byte* place_of(const Said& said) const;

    std::shared_ptr<SharedMemory> own_;
    std::shared_ptr<SharedMemory> theirs_;
    std::size_t fragment_bytes_;
    std::uint64_t window_;
    std::uint32_t slot_count_;
    std::int32_t peer_;
    int event_;
    std::byte* out_;  // the channel to the peer, in this rank's segment
    std::byte* in_;   // the channel from the peer, in the peer's
    std::byte* out_slots_;
    std::byte* in_slots_;
    Channel& outgoing_;
    Channel& incoming_;
    std::shared_ptr<Slots> slots_;
    std::unique_ptr<Link> messages_;
    std::vector<std::optional<std::uint32_t>> held_;  // slots of those sent and not taken
    std::uint64_t sent_ = 0;
    std::uint64_t taken_ = 0;  // of those sent, as last seen
    std::uint64_t received_ = 0;
    Said said_{};
    std::uint64_t said_number_ = 0;  // the number of the fragment that it describes
    Stores to_slots_{slots_worth};
    Stores to_results_{results_worth};
};

}  // namespace syncline
