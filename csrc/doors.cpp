#include "doors.hpp"

#include <linux/filter.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <system_error>

namespace syncline {

namespace {

constexpr std::chrono::milliseconds enough_for_a_peer{100};

rlim_t most_descriptors() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        throw std::system_error(errno, std::generic_category(), "the limit of descriptors");
    }
    return limit.rlim_cur;
}

std::vector<int> descriptors() {
    std::vector<int> found;
    std::error_code none_left;
    const std::filesystem::directory_iterator entries("/proc/self/fd", none_left);
    for (const auto& entry : entries) found.push_back(std::stoi(entry.path().filename()));
    if (none_left) {  // then all are in use
        found.resize(most_descriptors());
        std::iota(found.begin(), found.end(), 0);
    }
    return found;
}

template <typename T>
bool option(int descriptor, int level, int name, T& value) {
    socklen_t length = sizeof value;
    return getsockopt(descriptor, level, name, &value, &length) == 0;
}

// Of this end; zeroes if it is no TCP socket.
sockaddr_storage place_of(int descriptor) {
    sockaddr_storage place{};
    int protocol = 0;
    socklen_t length = sizeof place;
    if (!option(descriptor, SOL_SOCKET, SO_PROTOCOL, protocol) || protocol != IPPROTO_TCP ||
        getsockname(descriptor, reinterpret_cast<sockaddr*>(&place), &length) != 0) {
        return {};
    }
    return place;
}

bool listens(int descriptor) {
    int value = 0;
    return place_of(descriptor).ss_family != 0 &&
           option(descriptor, SOL_SOCKET, SO_ACCEPTCONN, value) && value != 0;
}

// As the network has it, and UCX in addresses.
std::string port_of(const sockaddr_storage& place) {
    const bool six = place.ss_family == AF_INET6;
    const std::uint16_t port = six ? reinterpret_cast<const sockaddr_in6&>(place).sin6_port
                                   : reinterpret_cast<const sockaddr_in&>(place).sin_port;
    return {reinterpret_cast<const char*>(&port), sizeof port};
}

}  // namespace

std::vector<int> Doors::listening() {
    std::vector<int> found = descriptors();
    std::erase_if(found, [](int descriptor) { return !listens(descriptor); });
    return found;
}

Doors::Doors(const std::vector<int>& before, const std::string& address) {
    for (const int descriptor : listening()) {
        const sockaddr_storage place = place_of(descriptor);
        // Another thread may have opened a port meanwhile.
        if (std::ranges::find(before, descriptor) != before.end() ||
            address.find(port_of(place)) == std::string::npos) {
            continue;
        }
        listeners_.push_back(descriptor);
        places_.push_back(place);
    }
}

void Doors::close() const {
    // Not by shutdown() or close(): UCX would lose track of its own descriptors.
    sock_filter drop_all{BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog program{1, &drop_all};
    for (const int descriptor : listeners_) {
        if (setsockopt(descriptor, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0) {
            throw std::system_error(errno, std::generic_category(), "closing the ports of UCX");
        }
    }
    (void)turn_away(std::chrono::milliseconds(0));
}

std::size_t Doors::turn_away(std::chrono::milliseconds silent) const {
    std::size_t count = 0;
    for (const int descriptor : descriptors()) {
        const sockaddr_storage place = place_of(descriptor);
        const bool accepted =
            std::ranges::any_of(places_,
                                [&](const sockaddr_storage& each) {
                                    return std::memcmp(&each, &place, sizeof place) == 0;
                                }) &&
            !listens(descriptor);
        tcp_info info{};
        if (!accepted || !option(descriptor, IPPROTO_TCP, TCP_INFO, info) ||
            info.tcpi_bytes_received > 0) {
            continue;
        }
        ++count;
        // UCX sees the end of it, and closes it.
        if (info.tcpi_last_data_recv >= silent.count()) shutdown(descriptor, SHUT_RDWR);
    }
    return count;
}

void Doors::relieve() const {
    if (descriptors().size() > most_descriptors() / 2) (void)turn_away(enough_for_a_peer);
}

}  // namespace syncline
