#include "improve.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "rearrange.hpp"

namespace syncline {

namespace {

using Index = std::ptrdiff_t;

constexpr Index reach = 200;  // messages of the critical block that are looked at
constexpr std::int64_t tidy_budget = 20'000'000;  // messages looked at
constexpr double least_share = 1.0 / (1 << 14);   // of a message, handed to a neighbour
constexpr std::size_t window = 7;                 // atoms rearranged at once

class Improver {
  public:
    Improver(const Gradients& gradients, std::int64_t goal_ns, std::int64_t& budget)
        : gradients_(gradients),
          latency_ns_(gradients.latency_ns()),
          overlap_(gradients.overlap()),
          goal_ns_(goal_ns),
          budget_(budget) {}

    void set(Messages messages) {
        messages_ = std::move(messages);
        survey();
    }
    [[nodiscard]] const Messages& messages() const { return messages_; }
    [[nodiscard]] std::int64_t end_ns() const { return end_ns_; }

    void descend() {
        while (budget_ > 0 && end_ns_ > goal_ns_) {
            if (!improve_block() && !improve_windows()) return;
        }
    }

    void balance() {
        while (budget_ > 0 && end_ns_ > goal_ns_ && balance_block()) descend();
    }

    // Merges neighbouring slices while the round still ends at `limit_ns` or before.
    void tidy(std::int64_t limit_ns) {
        merge_successive(limit_ns);
        for (Index i = std::ssize(messages_) - 1; i >= 0 && budget_ > 0; --i) {
            bar_ns_ = limit_ns + 1;
            const Index j = neighbour(i, 1);
            if (j < 0) continue;
            const Slice whole{messages_[at(i)].begin, messages_[at(j)].end};
            if (edit(i, {}, j, whole, -1, {}) || edit(i, whole, j, {}, -1, {})) {
                i = std::min(i + 1, std::ssize(messages_));
            }
        }
    }

    // A few random changes near the critical block.
    void perturb(std::mt19937& random) {
        const auto pick = [&](Index low, Index high) {  // uniform_int_distribution is not portable
            return low + static_cast<Index>(random() % static_cast<std::uint32_t>(high - low + 1));
        };
        const Index changes = pick(1, 3);
        for (Index change = 0; change < changes; ++change) {
            const Index size = std::ssize(messages_);
            const Index low = std::max<Index>(block_ - 2, 0);
            const Index high = std::min<Index>(critical_ + 3, size - 1);
            const Index i = pick(low, high);
            switch (pick(0, 3)) {
                case 0: {  // elsewhere
                    const Index to = pick(low, high);
                    const Message moved = messages_[at(i)];
                    messages_.erase(messages_.begin() + i);
                    messages_.insert(messages_.begin() + std::min(to, size - 1), moved);
                    break;
                }
                case 1: {  // in two
                    const Message whole = messages_[at(i)];
                    const Cut place = gradients_.inside(whole.begin, whole.end,
                                                        static_cast<double>(pick(1, 9)) / 10);
                    if (place == whole.begin) break;
                    messages_[at(i)] = gradients_.message(whole.begin, place);
                    messages_.insert(messages_.begin() + pick(i, size),
                                     gradients_.message(place, whole.end));
                    break;
                }
                default: {  // merged with the slice after it
                    const Message first = messages_[at(i)];
                    const auto second = std::ranges::find(messages_, first.end, &Message::begin);
                    if (second == messages_.end()) break;
                    const Index j = second - messages_.begin();
                    messages_[at(i)] = gradients_.message(first.begin, second->end);
                    messages_.erase(messages_.begin() + j);
                    break;
                }
            }
        }
        survey();
    }

  private:
    static std::size_t at(Index index) { return static_cast<std::size_t>(index); }

    // Merges slices that adjoin and are sent one after the other, in one pass.
    void merge_successive(std::int64_t limit_ns) {
        Messages merged;
        Channel channel;
        for (Index i = 0; i < std::ssize(messages_);) {
            Message message = messages_[at(i)];
            for (++i; i < std::ssize(messages_); ++i) {
                const Message& next = messages_[at(i)];
                if (message.end != next.begin && next.end != message.begin) break;
                const Message both = gradients_.message(std::min(message.begin, next.begin),
                                                        std::max(message.end, next.end));
                Channel trial = channel;
                const std::int64_t arrived = trial.send(both, latency_ns_, overlap_);
                if (arrived + both.tail_ns > limit_ns || after_[at(i + 1)](trial) > limit_ns) break;
                message = both;
            }
            channel.send(message, latency_ns_, overlap_);
            merged.push_back(message);
        }
        set(std::move(merged));
    }

    // Recomputes everything that is kept beside the sequence. O(M log M).
    void survey() {
        const Index size = std::ssize(messages_);
        budget_ -= size;
        before_.resize(at(size + 1));
        worst_before_.resize(at(size + 1));
        after_.resize(at(size + 1));
        before_[0] = Channel{};
        worst_before_[0] = 0;
        end_ns_ = 0;
        critical_ = 0;
        for (Index i = 0; i < size; ++i) {
            Channel channel = before_[at(i)];
            const std::int64_t end =
                channel.send(messages_[at(i)], latency_ns_, overlap_) + messages_[at(i)].tail_ns;
            before_[at(i + 1)] = channel;
            if (end > end_ns_) {
                end_ns_ = end;
                critical_ = i;
            }
            worst_before_[at(i + 1)] = std::max(worst_before_[at(i)], end);
        }
        after_[at(size)] = Outlook{};
        for (Index i = size - 1; i >= 0; --i) {
            after_[at(i)] = after_[at(i + 1)].before(messages_[at(i)], latency_ns_, overlap_);
        }
        bar_ns_ = end_ns_;
        // The critical block: from the message whose readiness decides when the critical one
        // arrives.
        block_ = critical_;
        while (block_ > 0) {
            const Channel& channel = before_[at(block_)];
            const Message& message = messages_[at(block_)];
            const std::int64_t by_channel =
                std::max(channel.latency_free_ns + latency_ns_, channel.transmission_free_ns);
            if (message.ready_ns + latency_ns_ >= by_channel) break;
            --block_;
        }
        by_place_.resize(at(size));
        std::iota(by_place_.begin(), by_place_.end(), Index{0});
        std::ranges::sort(by_place_, {}, [&](Index i) { return messages_[at(i)].begin; });
        place_.resize(at(size));
        for (Index k = 0; k < size; ++k) place_[at(by_place_[at(k)])] = k;
    }

    // The message over the slice before or after that of message i; -1: none.
    Index neighbour(Index i, Index side) const {
        const Index k = place_[at(i)] + side;
        return k < 0 || k >= std::ssize(messages_) ? -1 : by_place_[at(k)];
    }

    // When the round would end with scratch_ in place of messages [low, high).
    std::int64_t judge(Index low, Index high) {
        budget_ -= std::ssize(scratch_) + 1;
        Channel channel = before_[at(low)];
        std::int64_t worst = worst_before_[at(low)];
        for (const Message& message : scratch_) {
            worst = std::max(worst, channel.send(message, latency_ns_, overlap_) + message.tail_ns);
            if (worst >= bar_ns_) return worst;
        }
        return std::max(worst, after_[at(high)](channel));
    }

    bool accept(Index low, Index high) {
        if (judge(low, high) >= bar_ns_) return false;
        replace(low, high, scratch_);
        return true;
    }

    void replace(Index low, Index high, std::span<const Message> with) {
        const auto place = messages_.erase(messages_.begin() + low, messages_.begin() + high);
        messages_.insert(place, with.begin(), with.end());
        survey();
    }

    // An edit of the sequence: message i becomes `kept` (nothing: empty slice), message j (if any)
    // becomes `glued`, and `apart` goes before message `position` (if it is not empty).
    struct Slice {
        Cut begin;
        Cut end;
    };
    bool edit(Index i, Slice kept, Index j, Slice glued, Index position, Slice apart) {
        Index low = i;
        Index high = i + 1;
        if (j >= 0) {
            low = std::min(low, j);
            high = std::max(high, j + 1);
        }
        if (apart.begin < apart.end) {
            low = std::min(low, position);
            high = std::max(high, position);
        }
        scratch_.clear();
        const auto add = [&](Slice slice) {
            if (slice.begin < slice.end) {
                scratch_.push_back(gradients_.message(slice.begin, slice.end));
            }
        };
        for (Index k = low; k <= high; ++k) {
            if (k == position) add(apart);
            if (k == high) break;
            if (k == i) {
                add(kept);
            } else if (k == j) {
                add(glued);
            } else {
                scratch_.push_back(messages_[at(k)]);
            }
        }
        return accept(low, high);
    }

    bool relocate(Index i, Index position) {
        if (position == i || position == i + 1) return false;
        const Message& message = messages_[at(i)];
        return edit(i, {}, -1, {}, position, {message.begin, message.end});
    }

    bool improve_block() {
        const Index first = std::max(block_, critical_ - reach);
        for (Index i = critical_; i >= first; --i) {
            if (budget_ <= 0) return false;
            if (improve_message(i)) return true;
        }
        return false;
    }

    bool improve_message(Index i) {
        const Message message = messages_[at(i)];
        const Index size = std::ssize(messages_);
        const Index critical = critical_;
        // Where a less urgent message would be sent.
        Index later = critical + 1;
        while (later < size && messages_[at(later)].tail_ns >= message.tail_ns) ++later;
        const Index places[] = {critical + 1, later, size, block_, i - 1, i + 2};
        for (const Index place : places) {
            if (place >= 0 && place <= size && relocate(i, place)) return true;
        }
        if (i < critical && relocate(critical, i)) return true;

        for (const Index side : {Index{-1}, Index{1}}) {
            const Index j = neighbour(i, side);
            if (j < 0) continue;
            const Message& other = messages_[at(j)];
            const Slice whole{std::min(message.begin, other.begin),
                              std::max(message.end, other.end)};
            if (edit(i, {}, j, whole, -1, {}) || edit(i, whole, j, {}, -1, {})) return true;
        }

        candidate_cuts(i);
        const std::vector<Cut> cuts = cuts_;
        for (const Cut cut : cuts) {
            const Slice head{message.begin, cut};
            const Slice rest{cut, message.end};
            for (const Index place : {critical + 1, later, size, block_, i, i + 1}) {
                if (edit(i, head, -1, {}, place, rest) || edit(i, rest, -1, {}, place, head)) {
                    return true;
                }
            }
            if (const Index j = neighbour(i, 1); j >= 0) {
                if (edit(i, head, j, {cut, messages_[at(j)].end}, -1, {})) return true;
            }
            if (const Index j = neighbour(i, -1); j >= 0) {
                if (edit(i, rest, j, {messages_[at(j)].begin, cut}, -1, {})) return true;
            }
        }
        return false;
    }

    // Where message i could be cut: between tensors, in equal parts, and so that its head or rest
    // has arrived when a later message of the block is ready to be sent.
    void candidate_cuts(Index i) {
        const Message& message = messages_[at(i)];
        cuts_.clear();
        const auto add = [&](Cut cut) {
            if (message.begin < cut && cut < message.end) cuts_.push_back(cut);
        };
        for (const double share : {0.5, 0.25, 0.75, 0.1, 0.9}) {
            const Cut cut = gradients_.inside(message.begin, message.end, share);
            add(cut);
            if (message.end.tensor - message.begin.tensor > 1) {
                add({cut.tensor, 0});
                add({cut.tensor + 1, 0});
            }
        }
        add({message.begin.tensor + 1, 0});
        add({message.end.element > 0 ? message.end.tensor : message.end.tensor - 1, 0});
        const std::int64_t begun =
            before_[at(i + 1)].transmission_free_ns - message.transmission_ns;
        const std::int64_t lead_ns = overlap_ ? latency_ns_ : 0;
        const Index last = std::min<Index>(critical_, i + 6);
        for (Index k = i + 1; k <= last; ++k) {
            const std::int64_t room = messages_[at(k)].ready_ns + lead_ns - begun;
            if (room <= 0 || room >= message.transmission_ns) continue;
            add_fitting(message, room);
        }
        // Before the block the channel idles.
        if (i > block_) {
            const std::int64_t room =
                messages_[at(block_)].ready_ns + lead_ns -
                std::max(before_[at(block_)].transmission_free_ns, message.ready_ns + latency_ns_);
            if (room > 0 && room < message.transmission_ns) add_fitting(message, room);
        }
        std::ranges::sort(cuts_);
        const auto repeated = std::ranges::unique(cuts_);
        cuts_.erase(repeated.begin(), repeated.end());
    }

    // The cuts of a message whose head, or rest, takes about `room` to transmit.
    void add_fitting(const Message& message, std::int64_t room) {
        const double share =
            static_cast<double>(room) / static_cast<double>(message.transmission_ns);
        for (const double part : {share, 1 - share}) {
            const Cut cut = gradients_.inside(message.begin, message.end, part);
            if (message.begin < cut && cut < message.end) cuts_.push_back(cut);
        }
    }

    // Hands ever smaller parts of the block's messages to the neighbouring slices, so that the
    // message that ends last ends together with the one that would end last instead.
    bool balance_block() {
        bool improved = false;
        const Index first = std::max(block_, critical_ - reach);
        for (Index i = critical_; i >= first && budget_ > 0; --i) {
            for (const Index side : {Index{-1}, Index{1}}) {
                for (double share = 0.5; share > least_share; share /= 2) {
                    if (hand_over(i, side, share)) improved = true;
                }
            }
        }
        return improved;
    }

    // Hands that share of message i to the neighbour on that side.
    bool hand_over(Index i, Index side, double share) {
        const Index j = neighbour(i, side);
        if (j < 0) return false;
        const Message& message = messages_[at(i)];
        const Message& other = messages_[at(j)];
        const Cut cut = gradients_.inside(message.begin, message.end, side < 0 ? share : 1 - share);
        if (cut == message.begin) return false;
        if (side < 0) return edit(i, {cut, message.end}, j, {other.begin, cut}, -1, {});
        return edit(i, {message.begin, cut}, j, {cut, other.end}, -1, {});
    }

    bool improve_windows() {
        const Index size = std::ssize(messages_);
        const Index first = std::max<Index>(std::max(block_ - 2, critical_ - reach), 0);
        const Index step = 1;
        for (Index low = std::min(critical_, size - 1); low >= first; low -= step) {
            if (budget_ <= 0) return false;
            for (const Index width : {Index{3}, Index{5}}) {
                const Index high = std::min(low + width, size);
                if (rearrange_window(low, high)) return true;
            }
        }
        return false;
    }

    bool rearrange_window(Index low, Index high) {
        atoms_.clear();
        for (Index k = low; k < high; ++k) {
            atoms_.push_back({messages_[at(k)].begin, messages_[at(k)].end});
        }
        if (atoms_.size() > window) return false;
        // Cut the longest while there is room.
        while (atoms_.size() < window) {
            std::size_t longest = 0;
            std::int64_t most = 0;
            Cut place{};
            for (std::size_t k = 0; k < atoms_.size(); ++k) {
                const Atom& atom = atoms_[k];
                const std::int64_t bytes =
                    gradients_.bytes(atom.end) - gradients_.bytes(atom.begin);
                if (bytes <= most) continue;
                Cut cut = gradients_.inside(atom.begin, atom.end, 0.5);
                if (cut == atom.begin) continue;
                if (cut.element > 0 && atom.end.tensor - atom.begin.tensor > 0) {
                    const Cut below{cut.tensor, 0};
                    const Cut above{cut.tensor + 1, 0};
                    if (atom.begin < below) {
                        cut = below;
                    } else if (above < atom.end) {
                        cut = above;
                    }
                }
                longest = k;
                most = bytes;
                place = cut;
            }
            if (most == 0) break;
            atoms_.push_back({place, atoms_[longest].end});
            atoms_[longest].end = place;
        }
        std::ranges::sort(atoms_, {}, &Atom::begin);
        budget_ -= 2000;
        if (worst_before_[at(low)] >= bar_ns_) return false;
        const Messages found =
            rearrange(gradients_, atoms_, before_[at(low)], after_[at(high)], bar_ns_);
        if (found.empty()) return false;
        replace(low, high, found);
        return true;
    }

    const Gradients& gradients_;
    const std::int64_t latency_ns_;
    const bool overlap_;
    const std::int64_t goal_ns_;
    std::int64_t& budget_;

    Messages messages_;
    std::int64_t end_ns_ = 0;
    std::int64_t bar_ns_ = 0;      // a change is made if the round ends before this
    Index critical_ = 0;           // the first message whose arrival + tail ends the round
    Index block_ = 0;              // where its block begins
    std::vector<Channel> before_;  // the channel before each message
    std::vector<std::int64_t> worst_before_;  // of arrival + tail
    std::vector<Outlook> after_;              // before each message, for it and what follows
    std::vector<Index> by_place_;             // message indices by slice
    std::vector<Index> place_;                // and back
    Messages scratch_;
    std::vector<Cut> cuts_;
    std::vector<Atom> atoms_;
};

}  // namespace

Messages tidy(const Gradients& gradients, Messages messages, std::int64_t limit_ns) {
    std::int64_t budget = tidy_budget;
    Improver improver(gradients, 0, budget);
    improver.set(std::move(messages));
    improver.tidy(limit_ns);
    return improver.messages();
}

Messages improve(const Gradients& gradients, Messages messages, std::int64_t goal_ns,
                 std::int64_t& budget, bool restart) {
    Improver improver(gradients, goal_ns, budget);
    improver.set(std::move(messages));
    const std::int64_t reserve = budget / 8;  // for the last step
    budget -= reserve;
    improver.descend();
    Messages best = improver.messages();
    std::int64_t best_ns = improver.end_ns();
    std::mt19937 random(1);
    while (restart && budget > 0 && best_ns > goal_ns) {
        improver.set(best);
        improver.perturb(random);
        improver.descend();
        if (improver.end_ns() <= best_ns) {
            best = improver.messages();
            best_ns = improver.end_ns();
        }
    }
    budget = std::max<std::int64_t>(budget, 0) + reserve;
    improver.set(std::move(best));
    improver.balance();
    return improver.messages();
}

}  // namespace syncline
