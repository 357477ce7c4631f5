#include "interfaces.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>

namespace syncline {

std::vector<Interface> interfaces() {
    ifaddrs* first = nullptr;
    if (getifaddrs(&first) != 0) {
        throw std::system_error(errno, std::generic_category(), "the network interfaces");
    }
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(first, &freeifaddrs);
    std::vector<Interface> found;
    for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
        if (each->ifa_addr == nullptr || each->ifa_netmask == nullptr ||
            (each->ifa_flags & IFF_UP) == 0) {
            continue;
        }
        const int family = each->ifa_addr->sa_family;
        if (family != AF_INET && family != AF_INET6) continue;
        const auto bytes_of = [&](const sockaddr* place) -> const void* {
            if (family == AF_INET) return &reinterpret_cast<const sockaddr_in*>(place)->sin_addr;
            return &reinterpret_cast<const sockaddr_in6*>(place)->sin6_addr;
        };
        const void* address = bytes_of(each->ifa_addr);
        if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(static_cast<const in6_addr*>(address))) {
            continue;
        }
        std::array<char, INET6_ADDRSTRLEN> text{};
        if (inet_ntop(family, address, text.data(), text.size()) == nullptr) continue;
        std::array<std::uint8_t, sizeof(in6_addr)> mask{};
        std::memcpy(mask.data(), bytes_of(each->ifa_netmask), family == AF_INET ? 4 : 16);
        int bits = 0;
        for (const std::uint8_t byte : mask) bits += std::popcount(byte);
        found.push_back({each->ifa_name, text.data(), bits});
    }
    return found;
}

}  // namespace syncline
