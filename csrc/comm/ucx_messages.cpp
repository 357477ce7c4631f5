#include "ucx_messages.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ucx_link.hpp"

namespace syncline {

std::size_t UcxMessages::fragment_bytes() const { return link_.fragment_bytes(); }

const std::string& UcxMessages::broken() const { return link_.broken(); }

bool UcxMessages::can_send() {
    (void)released();
    if (sent_ - taken_ >= UcxLink::most_ahead) link_.poll_notices();
    return broken().empty() && sends_.size() < link_.window_ &&
           sent_ - taken_ < UcxLink::most_ahead;
}

void UcxMessages::send(const std::byte* data, std::size_t bytes, const Call& call, bool,
                       const std::optional<Copies>&) {
    Sending& sending = sends_.emplace_back(Sending{call, nullptr});
    ucp_request_param_t parameters{};
    void* request =
        link_.ucx_.am_send_nbx(link_.endpoint_, static_cast<unsigned>(link_.rank_), &sending.call,
                               sizeof sending.call, data, bytes, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        link_.fail(UCS_PTR_STATUS(request));
    } else {
        sending.request = request;
    }
    ++sent_;
}

std::uint64_t UcxMessages::released() {
    while (!sends_.empty()) {
        void* request = sends_.front().request;
        if (request != nullptr) {
            const ucs_status_t status = link_.ucx_.request_check_status(request);
            if (status == UCS_INPROGRESS) break;
            if (status != UCS_OK) {
                link_.fail(status);
                break;
            }
            link_.ucx_.request_free(request);
        }
        sends_.pop_front();
    }
    return sent_ - sends_.size();
}

ucs_status_t UcxMessages::arrive(const Call& call, void* data, std::size_t bytes, bool held) {
    const auto* values = static_cast<const std::byte*>(data);
    if (held) {
        unexpected_.push_back({call, data, {}, bytes});
        return UCS_INPROGRESS;
    }
    unexpected_.push_back({call, nullptr, {values, values + bytes}, bytes});
    return UCS_OK;
}

void UcxMessages::receive(const Target& target, const Call& call) {
    const Unexpected first = std::move(unexpected_.front());
    unexpected_.pop_front();
    try {
        require_same(link_.peer_, first.call, first.bytes, call, target.bytes);
    } catch (...) {
        if (first.held != nullptr) link_.ucx_.am_data_release(link_.worker_->handle(), first.held);
        throw;
    }
    ++received_;
    if (first.held == nullptr) {
        if (first.bytes > 0) std::memcpy(target.result, first.copy.data(), first.bytes);
        return;
    }
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    void* request = link_.ucx_.am_recv_data_nbx(link_.worker_->handle(), first.held, target.result,
                                                first.bytes, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        --received_;
        link_.fail(UCS_PTR_STATUS(request));
    } else {
        fetching_ = request;
    }
}

std::uint64_t UcxMessages::received() {
    if (fetching_ != nullptr) {
        const ucs_status_t status = link_.ucx_.request_check_status(fetching_);
        if (status == UCS_INPROGRESS) return received_ - 1;
        link_.ucx_.request_free(std::exchange(fetching_, nullptr));
        if (status != UCS_OK) {
            link_.fail(status);  // nothing more will come
            --received_;
        }
    }
    if (received_ - acknowledged_ >= UcxLink::acknowledged_at_once && broken().empty() &&
        !link_.gave_up_) {
        acknowledged_ = received_;
        link_.notify({.word = UcxLink::Word::taken, .taken_messages = received_});
    }
    return received_;
}

bool UcxMessages::acknowledge(std::uint64_t taken) {
    if (taken > sent_) return false;
    taken_ = std::max(taken_, taken);
    return true;
}

void UcxMessages::cancel() {
    for (const Unexpected& each : unexpected_) {
        if (each.held != nullptr) link_.ucx_.am_data_release(link_.worker_->handle(), each.held);
    }
    unexpected_.clear();
    if (fetching_ != nullptr) link_.ucx_.request_cancel(link_.worker_->handle(), fetching_);
}

bool UcxMessages::pending() const {
    return link_.pending(fetching_) || std::ranges::any_of(sends_, [&](const Sending& each) {
               return link_.pending(each.request);
           });
}

void UcxMessages::release() {
    if (fetching_ != nullptr) link_.ucx_.request_free(fetching_);
    for (const Sending& each : sends_) {
        if (each.request != nullptr) link_.ucx_.request_free(each.request);
    }
}

}  // namespace syncline
