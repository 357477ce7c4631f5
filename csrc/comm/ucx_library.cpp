#include "ucx_library.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

#include "origin.hpp"

namespace syncline {

namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        throw std::runtime_error(std::string("this libucp has no function ") + name +
                                 "; UCX 1.12 or newer is needed");
    }
}

constexpr const char* log_level = "UCX_LOG_LEVEL";

UcxLibrary loaded(const std::string& path) {
    // UCX would print failed ranks on standard output, which our error already names. It reads its
    // log level when it is loaded.
    const bool quiet = getenv(log_level) == nullptr;
    if (quiet) setenv(log_level, "fatal", 1);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (quiet) unsetenv(log_level);
    if (library == nullptr) {
        const char* error = dlerror();
        throw std::runtime_error(std::string("cannot load UCX: ") +
                                 (error != nullptr ? error : path.c_str()));
    }
    UcxLibrary ucx{};
    find(library, "ucp_config_read", ucx.config_read);
    find(library, "ucp_config_modify", ucx.config_modify);
    find(library, "ucp_config_release", ucx.config_release);
    find(library, "ucp_init_version", ucx.init_version);
    find(library, "ucp_cleanup", ucx.cleanup);
    find(library, "ucp_worker_create", ucx.worker_create);
    find(library, "ucp_worker_destroy", ucx.worker_destroy);
    find(library, "ucp_worker_get_address", ucx.worker_get_address);
    find(library, "ucp_worker_release_address", ucx.worker_release_address);
    find(library, "ucp_worker_get_efd", ucx.worker_get_efd);
    find(library, "ucp_worker_arm", ucx.worker_arm);
    find(library, "ucp_worker_progress", ucx.worker_progress);
    find(library, "ucp_ep_create", ucx.ep_create);
    find(library, "ucp_ep_close_nbx", ucx.ep_close_nbx);
    find(library, "ucp_ep_flush_nbx", ucx.ep_flush_nbx);
    find(library, "ucp_tag_send_nbx", ucx.tag_send_nbx);
    find(library, "ucp_tag_recv_nbx", ucx.tag_recv_nbx);
    find(library, "ucp_worker_set_am_recv_handler", ucx.worker_set_am_recv_handler);
    find(library, "ucp_am_send_nbx", ucx.am_send_nbx);
    find(library, "ucp_am_recv_data_nbx", ucx.am_recv_data_nbx);
    find(library, "ucp_am_data_release", ucx.am_data_release);
    find(library, "ucp_request_check_status", ucx.request_check_status);
    find(library, "ucp_request_cancel", ucx.request_cancel);
    find(library, "ucp_request_free", ucx.request_free);
    find(library, "ucs_status_string", ucx.status_string);
    return ucx;
}

}  // namespace

const UcxLibrary& UcxLibrary::load(const std::string& path) {
    static const UcxLibrary library = loaded(path);
    static const Origin origin;
    if (origin.forked()) throw Forked("this process was forked after UCX was loaded");
    return library;
}

}  // namespace syncline
