// What one rank does in a collective, and what each of its transfers waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace syncline {

enum class Action : std::uint8_t { send, copy, reduce };

// A row of Schedule.program(rank): whole blocks go to, or come from, one peer.
struct Step {
    std::int32_t step;
    Action action;
    std::int32_t peer;
    std::int32_t block_start;
    std::int32_t block_stop;
};

// A step with what it waits for on its own rank.
struct Transfer {
    Action action;
    std::int32_t peer;
    std::int32_t block_start;
    std::int32_t block_stop;
    // The receives that last wrote the blocks that this sends or changes.
    std::vector<std::uint32_t> after_receives;
    // Earlier sends of the blocks that this receive changes.
    std::vector<std::uint32_t> after_sends;
    // Whether the rank has changed none of the blocks before: they still hold the input.
    bool fresh;
    // For a send: whether the rank changes a block in the step in which it sends it. Two ranks that
    // do so with each other would wait in a circle for their blocks to be read.
    bool exchanged = false;
    // For a send: the first send of the same content, if several have it.
    std::optional<std::uint32_t> copy_of;
};

// Shared by its Python object and by operations. Otherwise the thread that ends the last operation
// would need Python's lock to free it, while it holds that of the group.
class Program : public std::enable_shared_from_this<Program> {
  public:
    // `steps` in the order of Schedule.program(rank). Throws std::invalid_argument for ranks or
    // blocks that do not exist, and for steps out of order.
    Program(std::int32_t rank, std::int32_t ranks, std::int32_t blocks,
            std::span<const Step> steps);

    [[nodiscard]] std::int32_t rank() const { return rank_; }
    [[nodiscard]] std::int32_t ranks() const { return ranks_; }
    [[nodiscard]] std::int32_t blocks() const { return blocks_; }
    [[nodiscard]] const std::vector<Transfer>& transfers() const { return transfers_; }
    // For each peer, the transfers to it and from it, in order.
    [[nodiscard]] const std::vector<std::uint32_t>& sends_to(std::int32_t peer) const {
        return sends_[static_cast<std::size_t>(peer)];
    }
    [[nodiscard]] const std::vector<std::uint32_t>& receives_from(std::int32_t peer) const {
        return receives_[static_cast<std::size_t>(peer)];
    }
    // Whether every transfer's blocks are all fresh, or none of them: then a first reduction can
    // read the input and write elsewhere.
    [[nodiscard]] bool out_of_place() const { return out_of_place_; }
    // Which blocks the rank changes.
    [[nodiscard]] bool changes(std::int32_t block) const {
        return changed_[static_cast<std::size_t>(block)];
    }

  private:
    std::int32_t rank_;
    std::int32_t ranks_;
    std::int32_t blocks_;
    std::vector<Transfer> transfers_;
    std::vector<std::vector<std::uint32_t>> sends_;
    std::vector<std::vector<std::uint32_t>> receives_;
    std::vector<bool> changed_;
    bool out_of_place_ = true;
};

}  // namespace syncline
