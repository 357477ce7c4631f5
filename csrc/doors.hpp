// The TCP ports at which UCX waits for peers.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

namespace syncline {

// UCX accepts whoever connects, and keeps a connection for as long as the other end likes, even if
// that never says anything: each takes a file descriptor of this process.
class Doors {
  public:
    // The descriptors of this process that listen for TCP connections.
    [[nodiscard]] static std::vector<int> listening();

    Doors() = default;
    // Those that listen now, did not `before`, and whose port is in the address for peers.
    Doors(const std::vector<int>& before, const std::string& address);

    // Let nobody connect any more, and end the connections of those who have said nothing. Throws
    // std::system_error.
    void close() const;
    // End the connections whose other end has said nothing for so long. Returns how many there are.
    std::size_t turn_away(std::chrono::milliseconds silent) const;
    // The same for 100 ms, if more than half of the descriptors are in use that this process may
    // have: a peer speaks at once, but a busy machine may keep it from that.
    void relieve() const;

  private:
    std::vector<int> listeners_;
    std::vector<sockaddr_storage> places_;
};

}  // namespace syncline
