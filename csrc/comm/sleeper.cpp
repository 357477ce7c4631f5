#include "sleeper.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>

namespace syncline {

void EventSleeper::announce() {
    if (bell_ != nullptr) bell_->announce(Doorbell::by_event);
}

void EventSleeper::withdraw() {
    if (bell_ != nullptr) bell_->withdraw();
}

void EventSleeper::sleep(Clock::time_point deadline) {
    pollfd sources[] = {{transport_->event(), POLLIN, 0}, {event_, POLLIN, 0}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    constexpr std::chrono::milliseconds longest = Doorbell::longest_sleep;
    poll(sources, 2, static_cast<int>(std::clamp<std::int64_t>(left, 0, longest.count())));
    if ((sources[1].revents & POLLIN) != 0) {
        std::uint64_t count = 0;
        (void)!read(event_, &count, sizeof count);
    }
    withdraw();
}

void EventSleeper::wake() {
    const std::uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
}

}  // namespace syncline
