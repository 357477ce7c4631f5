// Where a rank puts fragments for its peers on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace syncline {

// Pieces of memory that several peers read. A fragment that goes to more than one of them is
// written once. Used by one thread at a time.
class Slots {
  public:
    // A fragment, of all that a group sends.
    struct Content {
        std::uint32_t sequence;  // of the collective
        std::uint32_t transfer;
        std::size_t offset;
        bool operator==(const Content&) const = default;
    };

    explicit Slots(std::uint32_t count) : slots_(count) {
        for (std::uint32_t slot = 0; slot < count; ++slot) free_.push_back(slot);
    }

    // The slot that already holds this, with one reader more; nothing if there is none.
    [[nodiscard]] std::optional<std::uint32_t> share(const Content& content) {
        const auto found = std::ranges::find_if(
            slots_, [&](const Slot& slot) { return slot.readers > 0 && slot.content == content; });
        if (found == slots_.end()) return std::nullopt;
        ++found->readers;
        return static_cast<std::uint32_t>(found - slots_.begin());
    }

    // A slot for one reader: the one that has been free for longest, since its lines have most
    // likely left its readers' caches. There is one as long as no peer has more fragments in flight
    // than there are slots for each.
    [[nodiscard]] std::uint32_t take(const std::optional<Content>& content) {
        const std::uint32_t slot = free_.front();
        free_.pop_front();
        slots_[slot] = {content, 1};
        return slot;
    }

    // A reader has taken the slot's content.
    void release(std::uint32_t slot) {
        if (--slots_[slot].readers == 0) free_.push_back(slot);
    }

  private:
    struct Slot {
        std::optional<Content> content;
        std::uint32_t readers = 0;
    };
    std::vector<Slot> slots_;
    std::deque<std::uint32_t> free_;
};

}  // namespace syncline
