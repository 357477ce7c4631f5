// The functions of UCX that are used, found in whichever libucp is installed. Nothing is linked, so
// that the core can be loaded where UCX is not needed.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace syncline {

struct UcxLibrary {
    // Load libucp from a path or by its name, once a process. Throws std::runtime_error, and Forked
    // in a fork of the process that loaded it: UCX's own thread is not there, and calls hang.
    static const UcxLibrary& load(const std::string& path);

    decltype(&ucp_config_read) config_read;
    decltype(&ucp_config_modify) config_modify;
    decltype(&ucp_config_release) config_release;
    decltype(&ucp_init_version) init_version;
    decltype(&ucp_cleanup) cleanup;
    decltype(&ucp_worker_create) worker_create;
    decltype(&ucp_worker_destroy) worker_destroy;
    decltype(&ucp_worker_get_address) worker_get_address;
    decltype(&ucp_worker_release_address) worker_release_address;
    decltype(&ucp_worker_get_efd) worker_get_efd;
    decltype(&ucp_worker_arm) worker_arm;
    decltype(&ucp_worker_progress) worker_progress;
    decltype(&ucp_ep_create) ep_create;
    decltype(&ucp_ep_close_nbx) ep_close_nbx;
    decltype(&ucp_ep_flush_nbx) ep_flush_nbx;
    decltype(&ucp_tag_send_nbx) tag_send_nbx;
    decltype(&ucp_tag_recv_nbx) tag_recv_nbx;
    decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
    decltype(&ucp_am_send_nbx) am_send_nbx;
    decltype(&ucp_am_recv_data_nbx) am_recv_data_nbx;
    decltype(&ucp_am_data_release) am_data_release;
    decltype(&ucp_request_check_status) request_check_status;
    decltype(&ucp_request_cancel) request_cancel;
    decltype(&ucp_request_free) request_free;
    const char* (*status_string)(ucs_status_t);
};

}  // namespace syncline
