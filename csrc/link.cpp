#include "link.hpp"

#include <iterator>

namespace syncline {

namespace {

const char* collective_of(const Call& call) {
    static constexpr const char* names[] = {"all-reduce",     "broadcast",  "reduce",
                                            "reduce-scatter", "all-gather", "send or receive",
                                            "gather",         "scatter",    "all-to-all"};
    return call.collective < std::size(names) ? names[call.collective] : "an unknown collective";
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
