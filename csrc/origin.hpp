// Tells a process from its forks.
#pragma once

#include <cstdint>

namespace syncline {

// The process that made it. A load finds out: getpid() is a system call, 0.7 us on some machines.
class Origin {
  public:
    Origin();
    // Whether this is a fork of that process, which has none of its threads.
    [[nodiscard]] bool forked() const;

  private:
    std::uint32_t forks_;
};

}  // namespace syncline
