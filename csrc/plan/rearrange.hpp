// The best way to merge and order a few slices: exhaustive, by dynamic programming over sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradients.hpp"

namespace syncline {

inline constexpr std::size_t most_atoms = 14;

struct Atom {
    Cut begin;
    Cut end;
};

// Returns the order of messages over the atoms, each message a run of adjoining ones, that makes
// max(arrival + tail) least, over themselves and over what follows (`outlook`), on the channel as
// it is. Returns nothing unless that is below `limit_ns`.
//
// Exact over all partitions into runs and all orders. For every set of atoms sent, only channels
// that are not dominated in latency, transmission and worst (arrival + tail) are kept: what follows
// is no worse after a channel that is free earlier. O(2^n n^2) times the number kept, for n atoms,
// at most most_atoms.
//
// atoms: sorted by begin, disjoint.
[[nodiscard]] Messages rearrange(const Gradients& gradients, std::span<const Atom> atoms,
                                 const Channel& channel, const Outlook& outlook,
                                 std::int64_t limit_ns);

}  // namespace syncline
