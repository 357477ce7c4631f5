#include "mailbox.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace syncline {

namespace {

// The program's own messages match by tag. Parts of a collective have an order that all ranks
// agree on: they arrive in it, or the ranks called different collectives.
bool same_key(const Call& a, const Call& b) {
    if (a.collective != exchange || b.collective != exchange) {
        return a.collective != exchange && b.collective != exchange;
    }
    return a.sequence == b.sequence;
}

}  // namespace

bool Message::accepts(std::int32_t from, const Call& call) const {
    const std::int32_t wanted = peer_.load(std::memory_order_relaxed);
    return (wanted == any_rank || wanted == from) && same_key(call, call_);
}

Mailbox::Mailbox(std::vector<Link*> links) {
    for (Link* link : links) lanes_.emplace_back().link = link;
}

void Mailbox::send(const MessageHandle& message) {
    lanes_.at(static_cast<std::size_t>(message->peer())).sends.push_back(message);
    ++open_;
}

void Mailbox::receive(const MessageHandle& message) {
    for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
        auto& asides = lanes_[rank].asides;
        const auto found = std::ranges::find_if(asides, [&](const auto& aside) {
            return aside->receiver == nullptr &&
                   message->accepts(static_cast<std::int32_t>(rank), aside->call);
        });
        if (found == asides.end()) continue;
        const std::shared_ptr<Aside> aside = *found;
        require_same(static_cast<std::int32_t>(rank), aside->call, 0, message->call_, 0);
        aside->receiver = message;
        asides.erase(found);  // the arrival still has it, if it is not complete
        ++open_;
        if (aside->complete) deliver(static_cast<std::int32_t>(rank), *aside);
        return;
    }
    wanted_.push_back(message);
    ++open_;
}

void Mailbox::deliver(std::int32_t rank, const Aside& aside) {
    Message& message = *aside.receiver;
    if (!aside.data.empty()) std::memcpy(message.target_, aside.data.data(), aside.data.size());
    message.peer_.store(rank, std::memory_order_release);
    finish(message);
}

bool Mailbox::progress() {
    if (idle()) return false;
    bool moved = false;
    for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
        Lane& lane = lanes_[rank];
        if (lane.link == nullptr) continue;
        while (progress_sends(lane)) moved = true;
        while (progress_receives(static_cast<std::int32_t>(rank), lane)) moved = true;
    }
    return moved;
}

bool Mailbox::progress_sends(Lane& lane) {
    if (lane.sends.empty() && lane.under_way.empty()) return false;
    bool moved = false;
    const std::uint64_t released = lane.link->released();
    for (; lane.released < released; ++lane.released) {
        if (lane.under_way.front().last) finish(*lane.under_way.front().message);
        lane.under_way.pop_front();
        moved = true;
    }
    if (lane.sends.empty() || !lane.link->can_send()) return moved;
    const MessageHandle message = lane.sends.front();
    const std::size_t bytes = std::min(message->bytes() - lane.offset, lane.link->fragment_bytes());
    const bool last = lane.offset + bytes == message->bytes();
    lane.under_way.push_back({message, last});
    lane.link->send(message->source_ + lane.offset, bytes, message->call_, true, std::nullopt);
    lane.offset += bytes;
    if (last) {
        lane.sends.pop_front();
        lane.offset = 0;
    }
    return true;
}

std::optional<Mailbox::Arrival> Mailbox::begin_arrival(std::int32_t rank, Lane& lane) {
    const Call* front = lane.link->front();
    if (front == nullptr) return std::nullopt;
    const Call found = *front;
    if (!is_possible(found) || !is_message(found)) {
        throw faulty(rank, "a message", describe(found));
    }
    const auto wanted = std::ranges::find_if(
        wanted_, [&](const auto& message) { return message->accepts(rank, found); });
    const std::size_t bytes = bytes_of(found);
    if (wanted != wanted_.end()) {
        const MessageHandle receiver = *wanted;
        require_same(rank, found, 0, receiver->call_, 0);
        receiver->peer_.store(rank, std::memory_order_release);
        wanted_.erase(wanted);
        return Arrival{found, receiver->target_, bytes, receiver, nullptr};
    }
    const bool blocks = std::ranges::any_of(wanted_, [&](const auto& message) {
        return message->peer() == any_rank || message->peer() == rank;
    });
    if (!blocks) return std::nullopt;
    auto aside = std::make_shared<Aside>();
    aside->call = found;
    lane.asides.push_back(aside);
    return Arrival{found, nullptr, bytes, nullptr, aside};
}

bool Mailbox::progress_receives(std::int32_t rank, Lane& lane) {
    if (!lane.arrival) lane.arrival = begin_arrival(rank, lane);
    if (!lane.arrival) return false;
    Arrival& arrival = *lane.arrival;
    bool moved = false;
    if (!arrival.last_begun && lane.link->front() != nullptr && lane.link->can_receive()) {
        const std::size_t bytes =
            std::min(arrival.bytes - arrival.begun, lane.link->fragment_bytes());
        if (arrival.aside != nullptr) {
            // It grows with what arrives, not with what is announced. Nothing is being written to
            // it now: a link for messages receives one fragment at a time.
            arrival.aside->data.resize(arrival.begun + bytes);
            arrival.target = arrival.aside->data.data();
        }
        lane.link->receive({arrival.target + arrival.begun, nullptr, bytes}, arrival.call);
        ++lane.received;
        arrival.begun += bytes;
        arrival.last_begun = arrival.begun == arrival.bytes;
        moved = true;
    }
    const std::uint64_t received = lane.link->received();  // this also tells the peer
    if (arrival.last_begun && received == lane.received) {
        finish_arrival(rank, lane);
        moved = true;
    }
    return moved;
}

void Mailbox::finish_arrival(std::int32_t rank, Lane& lane) {
    const Arrival arrival = std::move(*lane.arrival);
    lane.arrival.reset();
    if (arrival.receiver != nullptr) {
        finish(*arrival.receiver);
        return;
    }
    arrival.aside->complete = true;
    if (arrival.aside->receiver != nullptr) deliver(rank, *arrival.aside);
}

void Mailbox::finish(Message& message) {
    --open_;
    message.set_done(true);
}

bool Mailbox::has_arrived() const {
    return !idle() && std::ranges::any_of(lanes_, [](const Lane& lane) {
        return lane.link != nullptr && lane.link->front() != nullptr;
    });
}

const Message* Mailbox::missing(const std::function<bool(std::int32_t)>& lost) const {
    const auto silent = [&](std::size_t rank) {
        return lanes_[rank].link == nullptr ||
               (lanes_[rank].link->front() == nullptr && lost(static_cast<std::int32_t>(rank)));
    };
    bool all = true;
    for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
        const Lane& lane = lanes_[rank];
        all = all && silent(rank);
        if (lane.link == nullptr || !lost(static_cast<std::int32_t>(rank))) continue;
        if (!lane.link->can_send() || !lane.under_way.empty()) {
            if (!lane.sends.empty()) return lane.sends.front().get();
            if (!lane.under_way.empty()) return lane.under_way.front().message.get();
        }
        if (!silent(rank)) continue;
        if (lane.arrival) {
            const auto& receiver = lane.arrival->receiver != nullptr
                                       ? lane.arrival->receiver
                                       : lane.arrival->aside->receiver;
            if (receiver != nullptr) return receiver.get();
        }
        for (const MessageHandle& message : wanted_) {
            if (message->peer() == static_cast<std::int32_t>(rank)) return message.get();
        }
    }
    if (!all) return nullptr;
    const auto any = std::ranges::find_if(
        wanted_, [](const auto& message) { return message->peer() == any_rank; });
    return any == wanted_.end() ? nullptr : any->get();
}

void Mailbox::close() {
    wanted_.clear();
    open_ = 0;
    for (Lane& lane : lanes_) lane = Lane{};
}

}  // namespace syncline
