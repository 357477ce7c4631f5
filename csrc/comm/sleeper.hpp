// Where a group's threads sleep until a peer does something.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "doorbell.hpp"
#include "link.hpp"

namespace syncline {

using Clock = std::chrono::steady_clock;

class Sleeper {
  public:
    virtual ~Sleeper() = default;
    // Announce sleep; what peers do from now on ends it.
    virtual void announce() = 0;
    virtual void withdraw() = 0;
    // Called last, once everything was polled after announce(): whether it may sleep.
    virtual bool may_sleep() { return true; }
    virtual void sleep(Clock::time_point deadline) = 0;
    // End the sleep from this process.
    virtual void wake() = 0;
};

// Sleeps until a peer on this host rings.
class BellSleeper final : public Sleeper {
  public:
    explicit BellSleeper(Doorbell& bell) : bell_(bell) {}
    void announce() override { announced_ = bell_.announce(); }
    void withdraw() override { bell_.withdraw(); }
    void sleep(Clock::time_point deadline) override { bell_.sleep(announced_, deadline); }
    void wake() override { bell_.wake(); }

  private:
    Doorbell& bell_;
    std::uint32_t announced_ = 0;
};

// Sleeps until a transport, or a peer on this host, has something to progress.
class EventSleeper final : public Sleeper {
  public:
    // `bell` rings when ranks of this host do something; null if there are none. `event` is an
    // eventfd that they, and wake(), write to.
    EventSleeper(std::shared_ptr<Transport> transport, Doorbell* bell, int event)
        : transport_(std::move(transport)), bell_(bell), event_(event) {}

    void announce() override;
    void withdraw() override;
    bool may_sleep() override { return transport_->arm(); }
    void sleep(Clock::time_point deadline) override;
    void wake() override;

  private:
    std::shared_ptr<Transport> transport_;
    Doorbell* bell_;
    int event_;
};

}  // namespace syncline
