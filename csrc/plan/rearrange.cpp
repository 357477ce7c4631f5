#include "rearrange.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace syncline {

namespace {

struct Run {
    std::uint32_t set;
    Message message;
};

struct State {
    Channel channel;
    std::int64_t worst_ns;  // of arrival + tail so far
    std::int32_t before;    // index of the state before the last message; -1: none
    std::int32_t run;       // the last message
};

bool no_worse(const State& a, const State& b) {
    return a.channel.latency_free_ns <= b.channel.latency_free_ns &&
           a.channel.transmission_free_ns <= b.channel.transmission_free_ns &&
           a.worst_ns <= b.worst_ns;
}

}  // namespace

Messages rearrange(const Gradients& gradients, std::span<const Atom> atoms, const Channel& channel,
                   const Outlook& outlook, std::int64_t limit_ns) {
    const std::size_t count = atoms.size();
    if (count == 0 || count > most_atoms) throw std::invalid_argument("too few or many atoms");
    const std::int64_t latency_ns = gradients.latency_ns();
    const bool overlap = gradients.overlap();

    std::vector<Run> runs;
    std::vector<Message> alone;
    for (std::size_t first = 0; first < count; ++first) {
        std::uint32_t set = 0;
        for (std::size_t last = first; last < count; ++last) {
            if (last > first && atoms[last].begin != atoms[last - 1].end) break;
            set |= std::uint32_t{1} << last;
            runs.push_back({set, gradients.message(atoms[first].begin, atoms[last].end)});
            if (last == first) alone.push_back(runs.back().message);
        }
    }

    const std::uint32_t all = (std::uint32_t{1} << count) - 1;
    std::vector<State> states{{channel, 0, -1, -1}};
    std::vector<std::vector<std::int32_t>> kept(all + 1);
    kept[0].push_back(0);
    std::int32_t best = -1;
    for (std::uint32_t sent = 0; sent < all; ++sent) {
        for (const std::int32_t index : kept[sent]) {
            for (std::size_t r = 0; r < runs.size(); ++r) {
                if ((runs[r].set & sent) != 0) continue;
                State next = states[static_cast<std::size_t>(index)];
                const Message& message = runs[r].message;
                const std::int64_t arrived = next.channel.send(message, latency_ns, overlap);
                next.worst_ns = std::max(next.worst_ns, arrived + message.tail_ns);
                if (next.worst_ns >= limit_ns || outlook(next.channel) >= limit_ns) continue;
                const std::uint32_t after = sent | runs[r].set;
                bool hopeless = false;  // some atom left would end too late even if sent next
                for (std::size_t i = 0; i < count && !hopeless; ++i) {
                    if ((after >> i & 1U) != 0) continue;
                    Channel trial = next.channel;
                    hopeless =
                        trial.send(alone[i], latency_ns, overlap) + alone[i].tail_ns >= limit_ns;
                }
                if (hopeless) continue;
                std::vector<std::int32_t>& list = kept[after];
                const auto state_at = [&](std::int32_t i) -> const State& {
                    return states[static_cast<std::size_t>(i)];
                };
                if (std::ranges::any_of(
                        list, [&](std::int32_t i) { return no_worse(state_at(i), next); })) {
                    continue;
                }
                std::erase_if(list, [&](std::int32_t i) { return no_worse(next, state_at(i)); });
                next.before = index;
                next.run = static_cast<std::int32_t>(r);
                list.push_back(static_cast<std::int32_t>(states.size()));
                states.push_back(next);
                if (after == all) {
                    best = list.back();
                    limit_ns = std::max(next.worst_ns, outlook(next.channel));
                }
            }
        }
        kept[sent] = {};
    }

    Messages found;
    for (std::int32_t i = best; i > 0; i = states[static_cast<std::size_t>(i)].before) {
        found.push_back(
            runs[static_cast<std::size_t>(states[static_cast<std::size_t>(i)].run)].message);
    }
    std::ranges::reverse(found);
    return found;
}

}  // namespace syncline
