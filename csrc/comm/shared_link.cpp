#include "shared_link.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace syncline {

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t fragment_stride = 320;
// A larger vector has mostly left the caches by the time it is complete: its user fetches it from
// memory, however it was written.
constexpr std::size_t beyond_caches = std::size_t{4} << 20;

std::size_t pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, bool past) {
    past ? copy_past_caches(to, from, bytes) : void(std::memcpy(to, from, bytes));
}

}  // namespace

SharedMemory::SharedMemory(int descriptor, std::size_t bytes) : bytes_(bytes) {
    // Only a sealed size lasts, so the seals come first.
    const int seals = fcntl(descriptor, F_GET_SEALS);  // -1: not such memory
    const bool lasts = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
    struct stat found{};
    if (fstat(descriptor, &found) != 0) {
        throw std::system_error(errno, std::generic_category(), "examining shared memory");
    }
    if (!lasts || static_cast<std::uint64_t>(found.st_size) < bytes) {
        throw std::length_error(std::to_string(found.st_size) + " bytes" +
                                (lasts ? "" : " that may become fewer"));
    }
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "mapping shared memory");
    }
    data_ = static_cast<std::byte*>(mapped);
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

std::size_t SegmentLayout::channel_offset(std::int32_t to) const {
    // The counters, then the description of each fragment.
    const std::size_t channel = pages(2 * 64 + window * fragment_stride);
    return page + static_cast<std::size_t>(to) * channel;
}

std::uint32_t SegmentLayout::slots() const {
    return static_cast<std::uint32_t>(peers - 1) * window;
}

std::size_t SegmentLayout::slots_offset() const { return channel_offset(peers); }

std::size_t SegmentLayout::bytes() const { return slots_offset() + slots() * fragment_bytes; }

SharedLink::SharedLink(const SegmentLayout& layout, std::shared_ptr<SharedMemory> own,
                       std::shared_ptr<SharedMemory> theirs, std::int32_t own_place,
                       std::int32_t their_place, std::shared_ptr<Slots> slots, std::int32_t peer,
                       int event, std::size_t start)
    : own_(std::move(own)),
      theirs_(std::move(theirs)),
      fragment_bytes_(layout.fragment_bytes),
      window_(layout.window),
      slot_count_(layout.slots()),
      peer_(peer),
      event_(event),
      out_(own_->data() + start + layout.channel_offset(their_place)),
      in_(theirs_->data() + start + layout.channel_offset(own_place)),
      out_slots_(own_->data() + start + layout.slots_offset()),
      in_slots_(theirs_->data() + start + layout.slots_offset()),
      outgoing_(channel(*own_, start + layout.channel_offset(their_place))),
      incoming_(channel(*theirs_, start + layout.channel_offset(own_place))),
      slots_(std::move(slots)),
      held_(layout.window) {}

// New memory is zero, which is what a channel and a bell begin with; so none is constructed twice.
SharedLink::Channel& SharedLink::channel(const SharedMemory& segment, std::size_t offset) {
    return *std::launder(reinterpret_cast<Channel*>(segment.data() + offset));
}

Doorbell& SharedLink::bell_of(const SharedMemory& segment) {
    return *std::launder(reinterpret_cast<Doorbell*>(segment.data()));
}

SharedLink::Fragment& SharedLink::fragment(std::byte* base, std::uint64_t number) const {
    static_assert(sizeof(Fragment) <= fragment_stride);
    std::byte* at = base + sizeof(Channel) + (number % window_) * fragment_stride;
    return *std::launder(reinterpret_cast<Fragment*>(at));
}

void SharedLink::look() {
    const std::uint64_t taken = outgoing_.taken.load(std::memory_order_acquire);
    if (taken < taken_ || taken > sent_) {
        throw faulty(peer_,
                     std::to_string(taken_) + " to " + std::to_string(sent_) + " fragments taken",
                     std::to_string(taken));
    }
    for (; taken_ < taken; ++taken_) {
        if (const auto slot = std::exchange(held_[taken_ % window_], std::nullopt)) {
            slots_->release(*slot);
        }
    }
}

bool SharedLink::can_send() {
    if (sent_ - taken_ == window_) look();
    return sent_ - taken_ < window_;
}

std::uint32_t SharedLink::put(const std::byte* data, std::size_t bytes, const Call& call,
                              const std::optional<Copies>& copies) {
    std::optional<Slots::Content> content;
    if (copies) {
        content = {call.sequence, copies->transfer, copies->offset};
        if (const auto shared = slots_->share(*content)) return *shared;
    }
    const std::uint32_t slot = slots_->take(content);
    std::byte* to = out_slots_ + slot * fragment_bytes_;
    to_slots_.write(bytes, [&](bool past) { copy_bytes(to, data, bytes, past); });
    return slot;
}

void SharedLink::send(const std::byte* data, std::size_t bytes, const Call& call, bool,
                      const std::optional<Copies>& copies) {
    Fragment& line = fragment(out_, sent_);
    Said said{call, bytes, 0};
    if (bytes <= sizeof line.small) {
        if (bytes > 0) std::memcpy(line.small, data, bytes);  // an empty one's address may be null
    } else {
        const std::uint32_t slot = put(data, bytes, call, copies);
        held_[sent_ % window_] = slot;
        said.slot = slot;
    }
    line.said = std::bit_cast<SaidWords>(said);
    ++sent_;
    line.number.store(sent_, std::memory_order_release);
    bell_of(*theirs_).ring(event_);
}

bool SharedLink::can_receive() {
    const std::uint64_t number = fragment(in_, received_).number.load(std::memory_order_acquire);
    if (number == received_ + 1) return true;
    const std::uint64_t before = received_ < window_ ? 0 : received_ + 1 - window_;
    if (number != before) {
        throw faulty(
            peer_,
            "fragment " + std::to_string(before) + " or " + std::to_string(received_ + 1) + " here",
            std::to_string(number));
    }
    return false;
}

const SharedLink::Said& SharedLink::said() {
    if (said_number_ != received_ + 1) {
        SaidWords words;
        SaidWords& theirs = fragment(in_, received_).said;
        for (std::size_t i = 0; i < words.size(); ++i) {
            words[i] = std::atomic_ref(theirs[i]).load(std::memory_order_relaxed);
        }
        said_ = std::bit_cast<Said>(words);
        said_number_ = received_ + 1;
    }
    return said_;
}

const Call* SharedLink::front() { return can_receive() ? &said().call : nullptr; }

void SharedLink::receive(const Target& target, const Call& call) {
    const Said& sent = said();
    require_same(peer_, sent.call, sent.bytes, call, target.bytes);
    const std::byte* data = place_of(sent);
    const auto copy = [&](bool past) { copy_bytes(target.result, data, target.bytes, past); };
    if (target.own != nullptr) {
        combine(call.reduction, call.dtype, target.result, target.own, data,
                target.bytes / size_of(call.dtype));
    } else if (bytes_of(call) > beyond_caches) {
        to_results_.write(target.bytes, copy);
    } else if (target.bytes > 0) {  // an empty one's address may be null
        copy(false);
    }
    // A peer blocks because its window is full: then a multiple of half the window comes soon.
    // Ringing for each fragment would take as long as two small fragments.
    ++received_;
    incoming_.taken.store(received_, std::memory_order_release);
    if (received_ % std::max<std::uint64_t>(window_ / 2, 1) == 0) bell_of(*theirs_).ring(event_);
}

const std::byte* SharedLink::place_of(const Said& said) const {
    if (said.bytes <= small_bytes) return fragment(in_, received_).small;
    if (said.slot >= slot_count_) {
        throw faulty(peer_, "a slot below " + std::to_string(slot_count_),
                     std::to_string(said.slot));
    }
    return in_slots_ + said.slot * fragment_bytes_;
}

void SharedLink::give_up(const Verdict& verdict) {
    if (messages_ != nullptr) messages_->give_up(verdict);
    const auto culprit = static_cast<std::uint32_t>(verdict.culprit + 2);
    outgoing_.verdict.store(culprit * 4 + static_cast<std::uint32_t>(verdict.fault),
                            std::memory_order_release);
    bell_of(*theirs_).ring(event_);
}

std::optional<Verdict> SharedLink::given_up() {
    const std::uint32_t verdict = incoming_.verdict.load(std::memory_order_acquire);
    if (verdict == 0) return std::nullopt;
    return Verdict{static_cast<std::int32_t>(verdict / 4) - 2, static_cast<Fault>(verdict % 4)};
}

}  // namespace syncline
