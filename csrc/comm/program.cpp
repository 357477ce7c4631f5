#include "program.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace syncline {

namespace {

constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

void add(std::vector<std::uint32_t>& to, std::uint32_t transfer) {
    if (transfer != none && std::ranges::find(to, transfer) == to.end()) to.push_back(transfer);
}

void require(bool holds, const char* otherwise, std::size_t number) {
    if (!holds) throw std::invalid_argument("step " + std::to_string(number) + ": " + otherwise);
}

}  // namespace

Program::Program(std::int32_t rank, std::int32_t ranks, std::int32_t blocks,
                 std::span<const Step> steps)
    : rank_(rank), ranks_(ranks), blocks_(blocks) {
    if (ranks < 1 || rank < 0 || rank >= ranks || blocks < 1) {
        throw std::invalid_argument("a program needs a rank below the number of ranks, and blocks");
    }
    sends_.resize(static_cast<std::size_t>(ranks));
    receives_.resize(static_cast<std::size_t>(ranks));
    changed_.resize(static_cast<std::size_t>(blocks));
    transfers_.reserve(steps.size());

    std::vector<std::uint32_t> writer(static_cast<std::size_t>(blocks), none);
    std::vector<std::vector<std::uint32_t>> readers(static_cast<std::size_t>(blocks));
    // Sends of these blocks, one for each content.
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::uint32_t>> firsts;
    for (std::size_t number = 0; number < steps.size(); ++number) {
        const Step& step = steps[number];
        require(step.peer >= 0 && step.peer < ranks && step.peer != rank, "no such peer", number);
        require(step.block_start >= 0 && step.block_start < step.block_stop &&
                    step.block_stop <= blocks,
                "no such blocks", number);
        if (number > 0) {
            const Step& before = steps[number - 1];
            require(before.step < step.step ||
                        (before.step == step.step &&
                         (before.action == Action::send || step.action != Action::send)),
                    "must come by step, sends first", number);
        }
        const auto index = static_cast<std::uint32_t>(number);
        Transfer transfer{step.action, step.peer, step.block_start, step.block_stop, {}, {}, false,
                          false,       {}};
        std::int32_t fresh = 0;
        for (std::int32_t block = step.block_start; block < step.block_stop; ++block) {
            const auto at = static_cast<std::size_t>(block);
            fresh += changed_[at] ? 0 : 1;
            add(transfer.after_receives, writer[at]);
            if (step.action == Action::send) {
                readers[at].push_back(index);
            } else {
                for (const std::uint32_t reader : readers[at]) {
                    add(transfer.after_sends, reader);
                    if (steps[reader].step == step.step) transfers_[reader].exchanged = true;
                }
                readers[at].clear();
                writer[at] = index;
                changed_[at] = true;
            }
        }
        transfer.fresh = fresh > 0;
        if (fresh != 0 && fresh != step.block_stop - step.block_start) out_of_place_ = false;
        auto& list = step.action == Action::send ? sends_ : receives_;
        list[static_cast<std::size_t>(step.peer)].push_back(index);
        if (step.action == Action::send) {
            // Two sends have the same content if the same receives wrote their blocks last.
            auto& alike = firsts[{step.block_start, step.block_stop}];
            const auto first = std::ranges::find_if(alike, [&](std::uint32_t other) {
                return transfers_[other].after_receives == transfer.after_receives;
            });
            if (first != alike.end()) {
                transfers_[*first].copy_of = transfer.copy_of = *first;
            } else {
                alike.push_back(index);
            }
        }
        transfers_.push_back(std::move(transfer));
    }
}

}  // namespace syncline
