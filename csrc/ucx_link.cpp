#include "ucx_link.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace syncline {

namespace {

// A tag: who sends, which fragment of his to this rank, and what it belongs to. Fragments are
// matched by the first two; the third tells calls apart that differ. What is no fragment has the
// highest bit.
constexpr int number_bits = 24;
constexpr int call_bits = 24;
constexpr std::chrono::seconds longest_close{2};
// Small messages, and over TCP fragments, UCX keeps in memory until somebody takes them. So a rank
// sends no more ahead of its peer than this many, and a peer says every so often how many it took.
constexpr std::uint64_t most_ahead = 32;
constexpr std::uint64_t taken_at_once = most_ahead / 4;
constexpr ucp_tag_t number_mask = (ucp_tag_t{1} << number_bits) - 1;
constexpr ucp_tag_t call_mask = (ucp_tag_t{1} << call_bits) - 1;

ucp_tag_t notice_tag(std::int32_t from) {
    return ucp_tag_t{1} << 63 | static_cast<ucp_tag_t>(from) << (number_bits + call_bits);
}

ucp_tag_t summary(const Call& call) {
    std::uint64_t hash = call.count * 0x9e3779b97f4a7c15U;
    hash ^= (std::uint64_t{call.sequence} << 32 | call.variant) * 0xc2b2ae3d27d4eb4fU;
    const auto kind = static_cast<ucp_tag_t>(call.collective) << 7 |
                      static_cast<ucp_tag_t>(call.dtype) << 3 |
                      static_cast<ucp_tag_t>(call.reduction);
    return (kind << 14 | hash >> 50) & call_mask;
}

Call summarised(ucp_tag_t tag) {
    const auto kind = (tag & call_mask) >> 14;
    Call call{};
    call.collective = static_cast<std::uint8_t>(kind >> 7);
    call.dtype = static_cast<Dtype>(kind >> 3 & 15);
    call.reduction = static_cast<Reduction>(kind & 7);
    return call;
}

std::runtime_error failure(const UcxLibrary& ucx, const char* what, ucs_status_t status) {
    return std::runtime_error(std::string("UCX could not ") + what + ": " +
                              ucx.status_string(status));
}

}  // namespace

UcxWorker::UcxWorker(const std::string& library, const Settings& settings)
    : ucx_(UcxLibrary::load(library)) {
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
    parameters.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
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
      window_(window),
      scratch_(fragment_bytes * window) {
    ucp_ep_params_t parameters{};
    parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    parameters.address = reinterpret_cast<const ucp_address_t*>(address.data());
    parameters.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    parameters.err_handler.cb = [](void* link, ucp_ep_h, ucs_status_t status) {
        static_cast<UcxLink*>(link)->fail(status);
    };
    parameters.err_handler.arg = this;
    const ucs_status_t status = ucx_.ep_create(worker_->handle(), &parameters, &endpoint_);
    if (status != UCS_OK) {
        throw failure(ucx_, ("reach rank " + std::to_string(peer)).c_str(), status);
    }
    listen();
    say({Word::hello});
    const ucp_request_param_t nothing{};
    connecting_ = ucx_.ep_flush_nbx(endpoint_, &nothing);
}

UcxLink::~UcxLink() {
    const auto saying = [&] {
        return std::ranges::any_of(saying_, [&](const auto& s) { return pending(s.request); });
    };
    const auto deadline = Clock::now() + longest_close;
    const auto progress_while = [&](auto&& any) {
        while (any() && Clock::now() < deadline) worker_->progress();
    };
    if (broken_.empty() && !gave_up_) say({Word::left});
    // What is under way must not write to memory that is gone: cancel it, and see it end.
    for (const auto& receipt : receipts_) {
        ucx_.request_cancel(worker_->handle(), receipt->request);
    }
    if (listening_ != nullptr) ucx_.request_cancel(worker_->handle(), listening_);
    // A peer may still be waiting for what was sent last: it is flushed where there is a way. But
    // one that is told that this rank has given up takes no more than that.
    if (gave_up_) {
        progress_while([&] { return broken_.empty() && saying(); });
    }
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    parameters.flags = broken_.empty() && !gave_up_ ? 0 : UCP_EP_CLOSE_FLAG_FORCE;
    void* closing = ucx_.ep_close_nbx(endpoint_, &parameters);
    progress_while([&] {
        return pending(closing) || pending(listening_) || pending(connecting_) || saying() ||
               std::ranges::any_of(sends_, [&](const auto& s) { return pending(s.request); }) ||
               std::ranges::any_of(receipts_, [&](const auto& r) { return pending(r->request); });
    });
    if (UCS_PTR_IS_PTR(closing)) ucx_.request_free(closing);
    if (UCS_PTR_IS_PTR(connecting_)) ucx_.request_free(connecting_);
    if (listening_ != nullptr) ucx_.request_free(listening_);
    for (const Saying& each : saying_) ucx_.request_free(each.request);
    for (const Sending& sending : sends_) {
        if (sending.request != nullptr) ucx_.request_free(sending.request);
    }
    for (const auto& receipt : receipts_) ucx_.request_free(receipt->request);
}

void UcxLink::fail(ucs_status_t status) {
    if (!broken_.empty()) return;
    hear();  // it may have said that it was about to
    const std::string rank = "rank " + std::to_string(peer_);
    broken_ = left_ ? rank + " has left the group"
                    : rank + " has ended, or cannot be reached any more (" +
                          ucx_.status_string(status) + ")";
}

bool UcxLink::pending(void* request) const {
    return UCS_PTR_IS_PTR(request) && ucx_.request_check_status(request) == UCS_INPROGRESS;
}

void UcxLink::say(const Notice& notice) {
    while (!saying_.empty() && !pending(saying_.front().request)) {
        ucx_.request_free(saying_.front().request);
        saying_.pop_front();
    }
    auto kept = std::make_unique<Notice>(notice);
    ucp_request_param_t parameters{};
    void* request =
        ucx_.tag_send_nbx(endpoint_, kept.get(), sizeof notice, notice_tag(rank_), &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request));
    } else if (request != nullptr) {
        saying_.push_back({std::move(kept), request});
    }
}

void UcxLink::listen() {
    ucp_request_param_t parameters{};
    parameters.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    void* request = ucx_.tag_recv_nbx(worker_->handle(), &heard_, sizeof heard_, notice_tag(peer_),
                                      ~ucp_tag_t{0}, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        listening_ = nullptr;
        fail(UCS_PTR_STATUS(request));
    } else {
        listening_ = request;
    }
}

void UcxLink::hear() {
    while (listening_ != nullptr) {
        const ucs_status_t status = ucx_.request_check_status(listening_);
        if (status == UCS_INPROGRESS) return;
        ucx_.request_free(listening_);
        listening_ = nullptr;
        if (status != UCS_OK) return fail(status);
        if (heard_.word == Word::given_up) {
            verdict_ = heard_.verdict;
        }
        taken_ = std::max(taken_, heard_.taken);
        greeted_ = greeted_ || heard_.word == Word::ready;
        left_ = left_ || heard_.word == Word::left;
        listen();
    }
}

bool UcxLink::connected() {
    hear();
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
        say({Word::ready});
    }
    return greeted_ &&
           std::ranges::none_of(saying_, [&](const Saying& each) { return pending(each.request); });
}

void UcxLink::give_up(const Verdict& verdict) {
    gave_up_ = true;
    if (broken_.empty()) say({Word::given_up, verdict});
}

std::optional<Verdict> UcxLink::given_up() {
    hear();
    return verdict_;
}

ucp_tag_t UcxLink::tag(std::int32_t from, std::uint64_t number, const Call& call) const {
    return static_cast<ucp_tag_t>(from) << (number_bits + call_bits) |
           (number & number_mask) << call_bits | summary(call);
}

bool UcxLink::can_send() {
    if (sends_.size() >= window_) reap();
    if (sent_ - taken_ >= most_ahead) hear();
    return broken_.empty() && sends_.size() < window_ && sent_ - taken_ < most_ahead;
}

void UcxLink::send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow) {
    std::vector<std::byte> copy;
    if (!may_borrow) {
        copy.assign(data, data + bytes);
        data = copy.data();
    }
    ucp_request_param_t parameters{};
    void* request = ucx_.tag_send_nbx(endpoint_, data, bytes, tag(rank_, sent_, call), &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request));
        request = nullptr;
    }
    sends_.push_back({request, std::move(copy)});
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

// Also where the connection is broken: what had come before is taken still.
bool UcxLink::can_receive() { return posted_ - received_ < window_; }

void UcxLink::receive(const Target& target, const Call& call) {
    auto receipt = std::make_unique<Receipt>();
    *receipt = {nullptr, target, call, posted_ % window_, 0, 0, UCS_INPROGRESS};
    std::byte* buffer = target.own != nullptr ? scratch_.data() + receipt->scratch * fragment_bytes_
                                              : target.result;
    ucp_request_param_t parameters{};
    parameters.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    parameters.cb.recv = [](void*, ucs_status_t status, const ucp_tag_recv_info_t* info,
                            void* user) {
        auto* done = static_cast<Receipt*>(user);
        done->status = status;
        done->tag = info->sender_tag;
        done->bytes = info->length;
    };
    parameters.user_data = receipt.get();
    void* request = ucx_.tag_recv_nbx(worker_->handle(), buffer, target.bytes,
                                      tag(peer_, posted_, call), ~call_mask, &parameters);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request));
        return;
    }
    receipt->request = request;
    receipts_.push_back(std::move(receipt));
    ++posted_;
}

std::uint64_t UcxLink::received() {
    while (!receipts_.empty() && receipts_.front()->status != UCS_INPROGRESS) {
        const ucs_status_t status = receipts_.front()->status;
        if (status != UCS_OK && status != UCS_ERR_MESSAGE_TRUNCATED) {
            fail(status);  // nothing more will come
            break;
        }
        const std::unique_ptr<Receipt> receipt = std::move(receipts_.front());
        receipts_.pop_front();
        ucx_.request_free(receipt->request);
        accept(*receipt);
        ++received_;
    }
    if (received_ - told_ >= taken_at_once && broken_.empty() && !gave_up_) {
        told_ = received_;
        say({Word::taken, {-1, false}, received_});
    }
    return received_;
}

void UcxLink::accept(const Receipt& receipt) {
    const bool disagrees = (receipt.tag & call_mask) != summary(receipt.call);
    if (receipt.status == UCS_ERR_MESSAGE_TRUNCATED ||
        (receipt.status == UCS_OK && (disagrees || receipt.bytes != receipt.target.bytes))) {
        const Call other = summarised(receipt.tag);
        const bool same_kind = other.collective == receipt.call.collective &&
                               other.dtype == receipt.call.dtype &&
                               other.reduction == receipt.call.reduction;
        throw PeerFailure(peer_, true,
                          "this rank called " + describe(receipt.call) + ", rank " +
                              std::to_string(peer_) + " " +
                              (same_kind ? std::string("one of another size, root or algorithm")
                                         : describe_kind(other)));
    }
    if (receipt.target.own != nullptr) {
        combine(receipt.call.reduction, receipt.call.dtype, receipt.target.result,
                receipt.target.own, scratch_.data() + receipt.scratch * fragment_bytes_,
                receipt.target.bytes / size_of(receipt.call.dtype));
    }
}

UcxSleeper::UcxSleeper(std::shared_ptr<UcxWorker> worker, Doorbell* bell, int event)
    : worker_(std::move(worker)), bell_(bell), event_(event) {}

void UcxSleeper::announce() {
    if (bell_ != nullptr) bell_->announce(Doorbell::by_event);
}

void UcxSleeper::withdraw() {
    if (bell_ != nullptr) bell_->withdraw();
}

void UcxSleeper::sleep(Clock::time_point deadline) {
    pollfd sources[] = {{worker_->event(), POLLIN, 0}, {event_, POLLIN, 0}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    poll(sources, 2, static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000)));
    if ((sources[1].revents & POLLIN) != 0) {
        std::uint64_t count = 0;
        (void)!read(event_, &count, sizeof count);
    }
    withdraw();
}

void UcxSleeper::wake() {
    const std::uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
}

}  // namespace syncline
