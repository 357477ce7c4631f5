// The network interfaces of this host.
#pragma once

#include <string>
#include <vector>

namespace syncline {

struct Interface {
    std::string name;
    std::string address;  // as text, of IPv4 or IPv6
    int prefix_bits;      // of its network
};

// An entry for each address of an interface that is up, in the kernel's order, without link-local
// addresses (fe80::/10), which mean nothing on another host. Throws std::system_error.
[[nodiscard]] std::vector<Interface> interfaces();

}  // namespace syncline
