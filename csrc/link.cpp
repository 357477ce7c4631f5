#include "link.hpp"

#include <iterator>

namespace syncline {

std::string describe(const Call& call) {
    static constexpr const char* names[] = {"all-reduce",     "broadcast",  "reduce",
                                            "reduce-scatter", "all-gather", "send or receive"};
    const std::string name =
        call.collective < std::size(names) ? names[call.collective] : "an unknown collective";
    const bool reduces = call.collective == 0 || call.collective == 2 || call.collective == 3;
    return name + " number " + std::to_string(call.sequence) + " of " + std::to_string(call.count) +
           " elements of " + name_of(call.dtype) +
           (reduces ? std::string(" by ") + name_of(call.reduction) : std::string());
}

}  // namespace syncline
