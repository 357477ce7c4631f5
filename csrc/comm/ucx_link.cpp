#include "ucx_link.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace syncline {

namespace {

// Marks the tags of notices; the bits below are the sender.
constexpr ucp_tag_t notice_bit = ucp_tag_t{1} << 63;
constexpr std::chrono::seconds longest_close{2};
constexpr std::size_t piece_bytes = 4096;  // stays in the first cache
ucp_tag_t notice_tag(std::int32_t from) { return notice_bit | static_cast<ucp_tag_t>(from); }

std::runtime_error failure(const UcxLibrary& ucx, const char* what, ucs_status_t status) {
    return std::runtime_error(std::string("UCX could not ") + what + ": " +
                              ucx.status_string(status));
}

}  // namespace

UcxWorker::UcxWorker(const UcxLibrary& library, const Settings& settings) : ucx_(library) {
    ucp_config_t* config = nullptr;
    ucs_status_t status = ucx_.config_read(nullptr, nullptr, &config);
    if (status != UCS_OK) throw failure(ucx_, "read its configuration", status);
    for (const auto& [name, value] : settings) {
        status = ucx_.config_modify(config, name.c_str(), value.c_str());
        if (status != UCS_OK) {
            ucx_.config_release(config);
            throw failure(ucx_, ("take " + name + "=" + value).c_str(), status);
        }
    }
    ucp_params_t parameters{};
    parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
    parameters.features = UCP_FEATURE_AM | UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
    status = ucx_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &parameters, config, &context_);
    ucx_.config_release(config);
    if (status != UCS_OK) throw failure(ucx_, "begin", status);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    status = ucx_.worker_create(context_, &worker, &worker_);
    if (status != UCS_OK) {
        ucx_.cleanup(context_);
        throw failure(ucx_, "make a worker", status);
    }
    status = ucx_.worker_get_efd(worker_, &event_);
    if (status != UCS_OK) {
        ucx_.worker_destroy(worker_);
        ucx_.cleanup(context_);
        throw failure(ucx_, "wake sleepers", status);
    }
}

UcxWorker::~UcxWorker() { close(); }

void UcxWorker::close() {
    if (worker_ == nullptr) return;
    ucx_.worker_destroy(std::exchange(worker_, nullptr));
    ucx_.cleanup(context_);
}

std::string UcxWorker::address() const {
    ucp_address_t* address = nullptr;
    std::size_t length = 0;
    const ucs_status_t status = ucx_.worker_get_address(worker_, &address, &length);
    if (status != UCS_OK) throw failure(ucx_, "tell its address", status);
    std::string copy(reinterpret_cast<const char*>(address), length);
    ucx_.worker_release_address(worker_, address);
    return copy;
}

bool UcxWorker::arm() { return ucx_.worker_arm(worker_) == UCS_OK; }

void UcxWorker::sleep(std::chrono::milliseconds longest) {
    if (!arm()) return;
    pollfd source{event_, POLLIN, 0};
    poll(&source, 1, static_cast<int>(longest.count()));
}

UcxLink::UcxLink(std::shared_ptr<UcxWorker> worker, const std::string& address, std::int32_t rank,
                 std::int32_t peer, std::size_t fragment_bytes, std::uint32_t window)
    : worker_(std::move(worker)),
      ucx_(worker_->library()),
      rank_(rank),
      peer_(peer),
      fragment_bytes_(fragment_bytes),
      window_(window) {
    ucp_ep_params_t parameters{};
    parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
    parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    parameters.err_handler.cb = [](void* link, ucp_ep_h, ucs_status_t status) {
        auto& self = *static_cast<UcxLink*>(link);
        try {
            self.fail(status);
        } catch (...) {
            self.worker_->keep_exception();
        }
    };
    parameters.err_handler.arg = this;
    const ucs_status_t status = ucx_.ep_create(worker_->handle(), &parameters, &endpoint_);
    if (status != UCS_OK) {
        throw failure(ucx_, ("reach rank " + std::to_string(peer)).c_str(), status);
    }
    handle(true);
    receive_notice();
    greet();
    const ucp_request_param_t nothing{};
    connecting_ = ucx_.ep_flush_nbx(endpoint_, &nothing);
}

// UCX sends an active message without a copy only once it knows the peer's endpoint, and for that
// the peer must read what has arrived. The first fragment must not depend on that.
void UcxLink::greet() {
    static constexpr std::byte nothing{};
    ucp_request_param_t parameters{};
    void* request = ucx_.am_send_nbx(endpoint_, static_cast<unsigned>(rank_), nullptr, 0, &nothing,
                                     sizeof nothing, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request));
    } else if (request != nullptr) {
        notifications_.push_back({nullptr, request});
    }
}

UcxLink::~UcxLink() {
    const auto saying = [&] {
        return std::ranges::any_of(notifications_,
                                   [&](const auto& s) { return pending(s.request); });
    };
    const auto progress_while = [&](auto&& any) {
        const auto deadline = Clock::now() + longest_close;
        while (any() && Clock::now() < deadline) ucx_.worker_progress(worker_->handle());
    };
    end();
    closing_ = true;
    try {
        if (broken_.empty() && !gave_up_) notify({Word::left});
    } catch (const std::bad_alloc&) {
        // The peer will see that the connection ends.
    }
    handle(false);
    if (receiving_notice_ != nullptr) ucx_.request_cancel(worker_->handle(), receiving_notice_);
    // A peer may still be waiting for the last sends, so they are flushed if possible. But a peer
    // that knows that this rank has given up receives nothing more.
    const ucp_request_param_t nothing{};
    const bool flushes = broken_.empty() && !gave_up_;
    void* flushing = flushes ? ucx_.ep_flush_nbx(endpoint_, &nothing) : nullptr;
    progress_while([&] { return broken_.empty() && (pending(flushing) || saying()); });
    // What is still in flight now is cut off, so that UCX does not read its memory once freed.
    const bool through = flushes && broken_.empty() && !pending(flushing);
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = through ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
    void* closing = ucx_.ep_close_nbx(endpoint_, &parameters);
    progress_while([&] {
        return messages_.pending() || pending(closing) || pending(flushing) ||
               pending(receiving_notice_) || pending(connecting_) || saying() ||
               std::ranges::any_of(sends_, [&](const auto& s) { return pending(s.request); }) ||
               std::ranges::any_of(receipts_, [&](const auto& r) { return pending(r.fetching); });
    });
    messages_.release();
    for (void* request : {closing, flushing}) {
        if (UCS_PTR_IS_PTR(request)) ucx_.request_free(request);
    }
    if (UCS_PTR_IS_PTR(connecting_)) ucx_.request_free(connecting_);
    if (receiving_notice_ != nullptr) ucx_.request_free(receiving_notice_);
    for (const Notification& each : notifications_) ucx_.request_free(each.request);
    for (const Sending& sending : sends_) {
        if (sending.request != nullptr) ucx_.request_free(sending.request);
    }
    for (const Receipt& receipt : receipts_) {
        if (receipt.fetching != nullptr) ucx_.request_free(receipt.fetching);
    }
}

// Receives in flight must not write to freed memory: cancel them. The destructor sees them end.
void UcxLink::end() {
    if (std::exchange(ending_, true)) return;
    for (const Unexpected& each : unexpected_) {
        if (each.held != nullptr) ucx_.am_data_release(worker_->handle(), each.held);
    }
    unexpected_.clear();
    messages_.cancel();
    for (const Receipt& receipt : receipts_) {
        if (receipt.fetching != nullptr) {
            ucx_.request_cancel(worker_->handle(), receipt.fetching);
        }
    }
}

// Without an answer, the notice may be lost: closing an endpoint may reset the connection, and UCX
// reads nothing more from a connection that it finds reset when it sends.
bool UcxLink::ended() {
    poll_notices();
    return !gave_up_ || verdict_ || left_ || refusal_ || !broken_.empty();
}

void UcxLink::handle(bool on) {
    ucp_am_handler_param_t parameters{};
    parameters.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                            UCP_AM_HANDLER_PARAM_FIELD_ARG;
    parameters.id = static_cast<unsigned>(peer_);
    parameters.arg = this;
    if (on) {
        parameters.cb = [](void* self, const void* header, std::size_t header_bytes, void* data,
                           std::size_t bytes, const ucp_am_recv_param_t* how) noexcept {
            auto& link = *static_cast<UcxLink*>(self);
            try {
                return link.arrive(header, header_bytes, data, bytes,
                                   (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
            } catch (...) {
                link.worker_->keep_exception();
                return UCS_OK;  // dropped
            }
        };
    }
    const ucs_status_t status = ucx_.worker_set_am_recv_handler(worker_->handle(), &parameters);
    if (on && status != UCS_OK) throw failure(ucx_, "take messages", status);
}

void UcxLink::fail(ucs_status_t status) {
    if (!broken_.empty()) return;
    poll_notices();  // it may have said that it was about to
    const std::string rank = "rank " + std::to_string(peer_);
    broken_ = left_ ? rank + " has left the group"
                    : rank + " has ended, or cannot be reached any more (" +
                          ucx_.status_string(status) + ")";
}

bool UcxLink::pending(void* request) const {
    return UCS_PTR_IS_PTR(request) && ucx_.request_check_status(request) == UCS_INPROGRESS;
}

void UcxLink::notify(const Notice& notice) {
    while (!notifications_.empty() && !pending(notifications_.front().request)) {
        ucx_.request_free(notifications_.front().request);
        notifications_.pop_front();
    }
    auto kept = std::make_unique<Notice>(notice);
    ucp_request_param_t parameters{};
    void* request =
        ucx_.tag_send_nbx(endpoint_, kept.get(), sizeof notice, notice_tag(rank_), &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request));
    } else if (request != nullptr) {
        notifications_.push_back({std::move(kept), request});
    }
}

void UcxLink::receive_notice() {
    notice_ = {};
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    void* request = ucx_.tag_recv_nbx(worker_->handle(), &notice_, sizeof notice_,
                                      notice_tag(peer_), ~ucp_tag_t{0}, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        receiving_notice_ = nullptr;
        fail(UCS_PTR_STATUS(request));
    } else {
        receiving_notice_ = request;
    }
}

void UcxLink::poll_notices() {
    while (receiving_notice_ != nullptr) {
        const ucs_status_t status = ucx_.request_check_status(receiving_notice_);
        if (status == UCS_INPROGRESS) return;
        ucx_.request_free(receiving_notice_);
        receiving_notice_ = nullptr;
        if (status == UCS_ERR_MESSAGE_TRUNCATED) {
            return refuse("a notice of " + std::to_string(sizeof notice_) + " bytes", "more");
        }
        if (status != UCS_OK) return fail(status);
        accept(notice_);
        if (!closing_ && !refusal_) receive_notice();
    }
}

void UcxLink::accept(const Notice& notice) {
    if (notice.word < Word::ready || notice.word > Word::left || notice.fault > Fault::disagrees) {
        return refuse("a notice",
                      "one of kind " + std::to_string(static_cast<std::uint32_t>(notice.word)) +
                          " and " + std::to_string(static_cast<std::uint32_t>(notice.fault)));
    }
    if (notice.taken > sent_ || !messages_.acknowledge(notice.taken_messages)) {
        return refuse(
            "at most " + std::to_string(sent_) + " fragments taken, and " +
                std::to_string(messages_.sent()) + " of messages",
            std::to_string(notice.taken) + " and " + std::to_string(notice.taken_messages));
    }
    taken_ = std::max(taken_, notice.taken);
    if (notice.word == Word::given_up) verdict_ = Verdict{notice.culprit, notice.fault};
    greeted_ = greeted_ || notice.word == Word::ready;
    left_ = left_ || notice.word == Word::left;
}

void UcxLink::refuse(const std::string& expected, const std::string& found) {
    if (!refusal_) refusal_ = faulty(peer_, expected, found);
}

bool UcxLink::connected() {
    poll_notices();
    if (refusal_) throw PeerFailure(*refusal_);
    if (UCS_PTR_IS_PTR(connecting_)) {
        const ucs_status_t status = ucx_.request_check_status(connecting_);
        if (status == UCS_INPROGRESS) return false;
        ucx_.request_free(std::exchange(connecting_, nullptr));
        if (status != UCS_OK) fail(status);
    } else if (UCS_PTR_IS_ERR(connecting_)) {
        fail(UCS_PTR_STATUS(std::exchange(connecting_, nullptr)));
    }
    if (!ready_ && broken_.empty()) {
        ready_ = true;
        notify({Word::ready});
    }
    return greeted_ && std::ranges::none_of(notifications_, [&](const Notification& each) {
               return pending(each.request);
           });
}

void UcxLink::give_up(const Verdict& verdict) {
    gave_up_ = true;
    if (broken_.empty()) notify({Word::given_up, verdict.culprit, verdict.fault});
}

std::optional<Verdict> UcxLink::given_up() {
    poll_notices();
    return verdict_;
}

bool UcxLink::can_send() {
    if (sends_.size() >= window_) reap();
    if (sent_ - taken_ >= most_ahead) poll_notices();
    return broken_.empty() && sends_.size() < window_ && sent_ - taken_ < most_ahead;
}

void UcxLink::send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
                   const std::optional<Copies>&) {
    Sending& sending = sends_.emplace_back(Sending{call, nullptr, {}});
    if (!may_borrow) {
        sending.copy.assign(data, data + bytes);
        data = sending.copy.data();
    }
    ucp_request_param_t parameters{};
    void* request = ucx_.am_send_nbx(endpoint_, static_cast<unsigned>(rank_), &sending.call,
                                     sizeof sending.call, data, bytes, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request));
    } else {
        sending.request = request;
    }
    ++sent_;
}

void UcxLink::reap() {
    while (!sends_.empty()) {
        void* request = sends_.front().request;
        if (request != nullptr) {
            const ucs_status_t status = ucx_.request_check_status(request);
            if (status == UCS_INPROGRESS) return;
            if (status != UCS_OK) return fail(status);
            ucx_.request_free(request);
        }
        sends_.pop_front();
    }
}

std::uint64_t UcxLink::released() {
    reap();
    std::uint64_t count = sent_ - sends_.size();
    for (const Sending& sending : sends_) {
        if (sending.copy.empty()) break;
        ++count;
    }
    return count;
}

// Also if the connection is broken: what arrived before is still taken.
bool UcxLink::can_receive() { return posted_ - received_ < window_; }

void UcxLink::receive(const Target& target, const Call& call) {
    receipts_.push_back({target, call, posted_ % window_});
    ++posted_;
    match();
}

ucs_status_t UcxLink::arrive(const void* header, std::size_t header_bytes, void* data,
                             std::size_t bytes, bool held) {
    if (ending_ || refusal_) return UCS_OK;              // dropped
    if (header_bytes == 0 && bytes == 1) return UCS_OK;  // a greeting
    Call call{};
    if (header_bytes == sizeof call) std::memcpy(&call, header, sizeof call);
    if (header_bytes != sizeof call || bytes > fragment_bytes_ || !is_possible(call)) {
        refuse("a fragment of at most " + std::to_string(fragment_bytes_) + " bytes",
               std::to_string(bytes) + " bytes after " + std::to_string(header_bytes) + " for " +
                   describe(call));
        return UCS_OK;
    }
    const std::uint64_t ahead = is_message(call) ? messages_.ahead() : arrived_ - acknowledged_;
    if (ahead >= most_ahead) {
        refuse("at most " + std::to_string(most_ahead) + " fragments ahead of those acknowledged",
               "one more in " + describe(call));
        return UCS_OK;
    }
    held = held && bytes > 0;  // an empty fragment leaves nothing to fetch
    return is_message(call) ? messages_.arrive(call, data, bytes, held)
                            : arrive(call, data, bytes, held);
}

ucs_status_t UcxLink::arrive(const Call& call, void* data, std::size_t bytes, bool held) {
    const auto* values = static_cast<const std::byte*>(data);
    if (held) {
        unexpected_.push_back({call, bytes, data, {}});
        ++arrived_;
        return UCS_INPROGRESS;
    }
    ++arrived_;
    if (unexpected_.empty() && matched_ < receipts_.size()) {
        Receipt& receipt = receipts_[matched_++];
        if (fits(receipt, call, bytes)) land(receipt, values);
    } else {
        unexpected_.push_back({call, bytes, nullptr, {values, values + bytes}});
    }
    return UCS_OK;
}

void UcxLink::match() {
    while (!unexpected_.empty() && matched_ < receipts_.size() && !refusal_) {
        Receipt& receipt = receipts_[matched_++];
        const Unexpected fragment = std::move(unexpected_.front());
        unexpected_.pop_front();
        if (!fits(receipt, fragment.call, fragment.bytes)) {
            if (fragment.held != nullptr) ucx_.am_data_release(worker_->handle(), fragment.held);
        } else if (fragment.held == nullptr) {
            land(receipt, fragment.copy.data());
        } else {
            ucp_request_param_t parameters{};
            parameters.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
            std::byte* buffer =
                receipt.target.own != nullptr ? scratch(receipt) : receipt.target.result;
            void* request = ucx_.am_recv_data_nbx(worker_->handle(), fragment.held, buffer,
                                                  fragment.bytes, &parameters);
            if (UCS_PTR_IS_ERR(request)) {
                fail(UCS_PTR_STATUS(request));
            } else {
                receipt.fetching = request;
            }
        }
    }
}

std::byte* UcxLink::scratch(const Receipt& receipt) {
    scratch_.resize(fragment_bytes_ * window_);
    return scratch_.data() + receipt.slot * fragment_bytes_;
}

std::uint64_t UcxLink::received() {
    match();
    while (!receipts_.empty()) {
        Receipt& receipt = receipts_.front();
        if (receipt.fetching != nullptr) {
            const ucs_status_t status = ucx_.request_check_status(receipt.fetching);
            if (status == UCS_INPROGRESS) break;
            ucx_.request_free(std::exchange(receipt.fetching, nullptr));
            if (status != UCS_OK) {
                fail(status);  // nothing more will come
                break;
            }
            if (receipt.target.own != nullptr) land(receipt, scratch(receipt));
            receipt.landed = true;
        }
        if (!receipt.landed) break;
        receipts_.pop_front();
        --matched_;
        ++received_;
    }
    if (refusal_) throw PeerFailure(*refusal_);
    if (received_ - acknowledged_ >= acknowledged_at_once && broken_.empty() && !gave_up_) {
        acknowledged_ = received_;
        notify({.word = Word::taken, .taken = received_});
    }
    return received_;
}

bool UcxLink::fits(const Receipt& receipt, const Call& call, std::size_t bytes) {
    try {
        require_same(peer_, call, bytes, receipt.call, receipt.target.bytes);
    } catch (const PeerFailure& failure) {
        if (!refusal_) refusal_ = failure;
        return false;
    }
    return true;
}

void UcxLink::land(Receipt& receipt, const std::byte* data) {
    receipt.landed = true;
    const Target& target = receipt.target;
    if (target.own == nullptr) {
        if (target.bytes > 0) std::memcpy(target.result, data, target.bytes);
        return;
    }
    // UCX's memory is not aligned: data to be reduced goes through a small buffer that is.
    const Call& call = receipt.call;
    alignas(64) std::array<std::byte, piece_bytes> piece;
    for (std::size_t done = 0; done < target.bytes; done += piece.size()) {
        const std::size_t bytes = std::min(piece.size(), target.bytes - done);
        std::memcpy(piece.data(), data + done, bytes);
        combine(call.reduction, call.dtype, target.result + done, target.own + done, piece.data(),
                bytes / size_of(call.dtype));
    }
}

}  // namespace syncline
