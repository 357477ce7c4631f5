// A UCX of the tests, whose requests end when a test says so, and memory that runs out. For one
// file of a program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "team.hpp"
#include "ucx_link.hpp"

// How often this thread may allocate memory until there is none; below 0: for ever.
inline thread_local int memory_left = -1;

void* operator new(std::size_t bytes) {
    if (memory_left == 0) throw std::bad_alloc();
    memory_left -= memory_left > 0 ? 1 : 0;
    if (void* block = std::malloc(bytes)) return block;
    throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t& /*how*/) noexcept {
    return memory_left == 0 ? nullptr : std::malloc(bytes);
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t /*bytes*/) noexcept { std::free(block); }

using syncline::EventSleeper;
using syncline::UcxLibrary;
using syncline::UcxLink;
using syncline::UcxWorker;

struct Request {
    ucs_status_t status = UCS_INPROGRESS;
    bool freed = false;
};

// What the functions below share; they have no argument of ours.
struct Fake {
    std::list<Request> requests;
    Request* receiving_notice = nullptr;  // the last that takes a notice
    Request* said = nullptr;              // the last that sends one
    Request* flush = nullptr;
    void* notice = nullptr;  // where the next one goes
    ucp_am_handler_param_t handler{};
    bool forced = false;
    int freed_in_progress = 0;
    ucp_err_handler_t on_error{};
    std::function<void()> on_progress = [] {};

    Request* begun(ucs_status_t status = UCS_INPROGRESS) {
        const int left = std::exchange(memory_left, -1);
        Request* request = &requests.emplace_back(Request{status});
        memory_left = left;
        return request;
    }
    void end_all(ucs_status_t status) {
        for (Request& each : requests) {
            if (each.status == UCS_INPROGRESS) each.status = status;
        }
    }
};
inline Fake* fake = nullptr;

inline UcxLibrary library() {
    UcxLibrary ucx{};
    ucx.config_read = [](auto...) { return UCS_OK; };
    ucx.config_release = [](auto...) {};
    ucx.init_version = [](auto...) { return UCS_OK; };
    ucx.cleanup = [](auto...) {};
    ucx.worker_create = [](ucp_context_h, const ucp_worker_params_t*, ucp_worker_h* worker) {
        static std::byte any;
        *worker = reinterpret_cast<ucp_worker_h>(&any);
        return UCS_OK;
    };
    ucx.worker_destroy = [](auto...) {};
    ucx.worker_get_efd = [](auto...) { return UCS_OK; };
    ucx.worker_arm = [](ucp_worker_h) { return UCS_ERR_BUSY; };  // nobody sleeps
    ucx.worker_progress = [](ucp_worker_h) {
        fake->on_progress();
        return 0U;
    };
    ucx.worker_get_address = [](ucp_worker_h, ucp_address_t** address, std::size_t* length) {
        static std::byte none;
        *address = reinterpret_cast<ucp_address_t*>(&none);
        *length = 0;
        return UCS_OK;
    };
    ucx.worker_release_address = [](auto...) {};
    ucx.worker_set_am_recv_handler = [](ucp_worker_h, const ucp_am_handler_param_t* parameters) {
        fake->handler = *parameters;
        return UCS_OK;
    };
    ucx.am_recv_data_nbx = [](ucp_worker_h, void*, void* buffer, std::size_t bytes,
                              auto...) -> ucs_status_ptr_t {
        std::memset(buffer, 1, bytes);  // a sanitizer sees whether there is room
        return fake->begun();
    };
    ucx.am_data_release = [](auto...) {};
    ucx.ep_create = [](ucp_worker_h, const ucp_ep_params_t* parameters, ucp_ep_h*) {
        fake->on_error = parameters->err_handler;
        return UCS_OK;
    };
    ucx.ep_close_nbx = [](ucp_ep_h, const ucp_request_param_t* how) -> ucs_status_ptr_t {
        fake->forced = (how->flags & UCP_EP_CLOSE_FLAG_FORCE) != 0;
        if (fake->forced) fake->end_all(UCS_ERR_CANCELED);
        return fake->forced ? nullptr : fake->begun(UCS_OK);
    };
    ucx.ep_flush_nbx = [](auto...) -> ucs_status_ptr_t { return fake->flush = fake->begun(); };
    ucx.am_send_nbx = [](auto...) -> ucs_status_ptr_t { return fake->begun(); };
    ucx.tag_send_nbx = [](auto...) -> ucs_status_ptr_t { return fake->said = fake->begun(); };
    ucx.tag_recv_nbx = [](ucp_worker_h, void* buffer, auto...) -> ucs_status_ptr_t {
        fake->notice = buffer;
        return fake->receiving_notice = fake->begun();
    };
    ucx.request_check_status = [](void* request) { return static_cast<Request*>(request)->status; };
    ucx.request_cancel = [](ucp_worker_h, void* request) {
        auto* cancelled = static_cast<Request*>(request);
        if (cancelled->status == UCS_INPROGRESS) cancelled->status = UCS_ERR_CANCELED;
    };
    ucx.request_free = [](void* request) {
        auto* freed = static_cast<Request*>(request);
        fake->freed_in_progress += freed->status == UCS_INPROGRESS ? 1 : 0;
        freed->freed = true;
    };
    ucx.status_string = [](ucs_status_t) { return "an error of the tests"; };
    return ucx;
}

// As ranks send it.
struct Notice {
    std::uint32_t word = 0;
    std::int32_t culprit = -1;
    std::uint32_t fault = 0;
    std::uint32_t reserved = 0;
    std::uint64_t taken = 0;
    std::uint64_t taken_messages = 0;
};
inline constexpr std::uint32_t taken = 2;
inline constexpr std::uint32_t given_up = 3;
inline constexpr std::size_t fragment_bytes = 4096;
inline constexpr std::size_t most_ahead = 32;

struct Pair {
    Fake ucx;
    UcxLibrary functions = library();
    std::shared_ptr<UcxWorker> worker;
    std::unique_ptr<UcxLink> link;

    Pair() {
        fake = &ucx;
        worker = std::make_shared<UcxWorker>(functions, UcxWorker::Settings{});
        link = std::make_unique<UcxLink>(worker, "address", 0, 1, fragment_bytes, 8);
    }

    ~Pair() {
        ucx.on_progress = [this] { ucx.end_all(UCS_OK); };
    }

    // What the peer says.
    void notice(const Notice& said, ucs_status_t status = UCS_OK) {
        std::memcpy(ucx.notice, &said, sizeof said);
        ucx.receiving_notice->status = status;
    }
    // What comes as an active message.
    ucs_status_t arrive(const void* header, std::size_t header_bytes, void* data, std::size_t bytes,
                        bool held = false) {
        ucp_am_recv_param_t how{};
        how.recv_attr = held ? UCP_AM_RECV_ATTR_FLAG_RNDV : 0;
        return ucx.handler.cb(ucx.handler.arg, header, header_bytes, data, bytes, &how);
    }
    ucs_status_t arrive(const Call& call, std::size_t bytes) {
        std::vector<std::byte> data(bytes);
        return arrive(&call, sizeof call, data.data(), bytes);
    }
    // Why the link takes nothing more; empty while it does.
    std::string refusal() {
        try {
            (void)link->given_up();
            (void)link->received();
        } catch (const PeerFailure& failure) {
            CHECK(failure.rank == 1 && failure.fault == syncline::Fault::lost);
            return failure.what();
        }
        return "";
    }
};

inline void send_some(Pair& pair, std::size_t count) {
    const std::array<std::byte, 100> data{};
    for (std::size_t i = 0; i < count; ++i) {
        pair.link->send(data.data(), data.size(), {}, false, std::nullopt);
    }
}
