// A collective or a message of a group, for which a thread may wait.
#pragma once

#include <atomic>

#include "link.hpp"

namespace syncline {

class Task {
  public:
    Task() = default;
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;
    virtual ~Task() = default;

    [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }
    [[nodiscard]] virtual const Call& call() const = 0;

  protected:
    void set_done(bool done) { done_.store(done, std::memory_order_release); }

  private:
    std::atomic<bool> done_ = false;
};

}  // namespace syncline
