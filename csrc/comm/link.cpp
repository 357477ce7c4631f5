#include "link.hpp"

#include <iterator>

namespace syncline {

namespace {

constexpr const char* collectives[] = {"all-reduce",     "broadcast",  "reduce",
                                       "reduce-scatter", "all-gather", "send or receive",
                                       "gather",         "scatter",    "all-to-all"};
// No address space holds more.
constexpr std::size_t most_bytes = std::size_t{1} << 47;

const char* collective_of(const Call& call) {
    return call.collective < std::size(collectives) ? collectives[call.collective]
                                                    : "an unknown collective";
}

std::string reduction_of(const Call& call) {
    const bool reduces = call.collective == 0 || call.collective == 2 || call.collective == 3;
    return reduces ? std::string(" by ") + name_of(call.reduction) : std::string();
}

}  // namespace

const std::string& Link::broken() const {
    static const std::string never;
    return never;
}

PeerFailure faulty(std::int32_t peer, const std::string& expected, const std::string& found) {
    return {peer, Fault::lost,
            "rank " + std::to_string(peer) + " is faulty: expected " + expected + ", found " +
                found +
                "; its memory is damaged, or something else writes where the two ranks exchange"};
}

bool is_possible(const Call& call) {
    return call.collective < std::size(collectives) && call.dtype <= Dtype::boolean &&
           call.reduction <= Reduction::bxor && call.count <= most_bytes / size_of(call.dtype);
}

void require_same(std::int32_t peer, const Call& sent, std::size_t sent_bytes, const Call& call,
                  std::size_t bytes) {
    if (sent == call && sent_bytes == bytes) return;
    if (sent == call) {
        throw faulty(peer, std::to_string(bytes) + " bytes in " + describe(call),
                     std::to_string(sent_bytes));
    }
    if (!is_possible(sent)) throw faulty(peer, describe(call), describe(sent));
    throw PeerFailure(peer, Fault::disagrees,
                      "rank " + std::to_string(peer) + " called " + describe(sent) +
                          ", this rank " + describe(call));
}

std::size_t bytes_of(const Call& call) { return call.count * size_of(call.dtype); }

std::string describe(const Call& call) {
    const std::string which = call.collective == exchange ? " with tag "
                              : is_message(call)          ? ", a part,"
                                                          : " number ";
    return std::string(collective_of(call)) + which +
           (which.ends_with(' ') ? std::to_string(call.sequence) : "") + " of " +
           std::to_string(call.count) + " elements of " + name_of(call.dtype) + reduction_of(call);
}

std::string describe_kind(const Call& call) {
    return std::string(collective_of(call)) + " of " + name_of(call.dtype) + reduction_of(call);
}

}  // namespace syncline
