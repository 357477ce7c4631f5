// Tests of links through UCX on a UCX of the tests, whose requests end when a test says so.
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <list>
#include <memory>

#include "check.hpp"
#include "ucx_link.hpp"

namespace {

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
    Request* listening = nullptr;  // the last that takes a notice
    Request* said = nullptr;       // the last that sends one
    Request* flush = nullptr;
    bool forced = false;
    int freed_in_progress = 0;
    ucp_err_handler_t on_error{};
    std::function<void()> on_progress = [] {};

    Request* begun(ucs_status_t status = UCS_INPROGRESS) {
        return &requests.emplace_back(Request{status});
    }
    void end_all(ucs_status_t status) {
        for (Request& each : requests) {
            if (each.status == UCS_INPROGRESS) each.status = status;
        }
    }
};
Fake* fake = nullptr;

UcxLibrary library() {
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
    ucx.worker_progress = [](ucp_worker_h) {
        fake->on_progress();
        return 0U;
    };
    ucx.worker_set_am_recv_handler = [](auto...) { return UCS_OK; };
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
    ucx.tag_recv_nbx = [](auto...) -> ucs_status_ptr_t { return fake->listening = fake->begun(); };
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

struct Pair {
    Fake ucx;
    UcxLibrary functions = library();
    std::shared_ptr<UcxWorker> worker;
    std::unique_ptr<UcxLink> link;

    Pair() {
        fake = &ucx;
        worker = std::make_shared<UcxWorker>(functions, UcxWorker::Settings{});
        link = std::make_unique<UcxLink>(worker, "address", 0, 1, 4096, 8);
    }
};

// A notice has come, and nobody has heard it, when the connection breaks while the link ends: it
// must not listen for another one, which would come into memory that is gone.
void a_link_that_ends_listens_no_more() {
    Pair pair;
    pair.link->give_up({-1, false});
    Request* heard = pair.ucx.listening;
    heard->status = UCS_OK;
    pair.ucx.on_progress = [&] {
        pair.ucx.on_error.cb(pair.ucx.on_error.arg, nullptr, UCS_ERR_CONNECTION_RESET);
        pair.ucx.end_all(UCS_ERR_CONNECTION_RESET);
    };
    pair.link.reset();
    CHECK(pair.ucx.listening == heard && heard->freed);
    CHECK(pair.ucx.freed_in_progress == 0);
}

// A peer takes nothing any more: what was sent to it is cut off, and not read when it is gone.
void what_is_not_through_is_cut_off() {
    Pair pair;
    const std::array<std::byte, 100> data{};
    pair.link->send(data.data(), data.size(), {}, false, std::nullopt);
    pair.link.reset();
    CHECK(pair.ucx.forced && pair.ucx.freed_in_progress == 0);
}

// Closing may reset the connection, and a peer that finds it reset reads no notice any more.
void a_rank_that_gives_up_waits_until_the_peer_knows() {
    Pair pair;
    CHECK(pair.link->ended());
    pair.link->give_up({2, false});
    pair.link->end();
    CHECK(!pair.link->ended());
    pair.ucx.on_error.cb(pair.ucx.on_error.arg, nullptr, UCS_ERR_CONNECTION_RESET);
    CHECK(pair.link->ended());
}

void what_is_through_is_closed_in_peace() {
    Pair pair;
    pair.ucx.on_progress = [&] { pair.ucx.end_all(UCS_OK); };
    pair.link.reset();
    CHECK(!pair.ucx.forced && pair.ucx.flush->freed && pair.ucx.freed_in_progress == 0);
}

}  // namespace

int main() {
    a_link_that_ends_listens_no_more();
    what_is_not_through_is_cut_off();
    a_rank_that_gives_up_waits_until_the_peer_knows();
    what_is_through_is_closed_in_peace();
    if (failed > 0) return 1;
    std::puts("ucx tests passed");
    return 0;
}
