#include "tcp_link.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>

namespace syncline {

namespace {

constexpr int most_events = 64;
constexpr std::size_t most_parts = 16;  // of a write
// While nothing is to be sent, these end the connection to a host that is silent for 25 s.
constexpr int idle_s = 5;
constexpr int between_probes_s = 5;
constexpr int most_probes = 4;
constexpr int looks = 25;  // for unacknowledged data, during the time that a host may be silent

[[noreturn]] void throw_error(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

// A fork would keep connections open when this process ends, so it closes its copies.
class Inherited {
  public:
    static Inherited& shared() {
        static auto* inherited = new Inherited;
        return *inherited;
    }
    void add(int descriptor) {
        const std::lock_guard lock(mutex_);
        descriptors_.push_back(descriptor);
    }
    void close(int descriptor) {
        const std::lock_guard lock(mutex_);
        std::erase(descriptors_, descriptor);
        ::close(descriptor);
    }

  private:
    Inherited() {
        pthread_atfork([] { shared().mutex_.lock(); }, [] { shared().mutex_.unlock(); },
                       [] {
                           for (const int descriptor : shared().descriptors_) ::close(descriptor);
                           shared().descriptors_.clear();
                           shared().mutex_.unlock();
                       });
    }
    std::mutex mutex_;
    std::vector<int> descriptors_;
};

void set(int socket, int level, int name, int value) {
    if (setsockopt(socket, level, name, &value, sizeof value) != 0) {
        throw_error("the options of a TCP connection");
    }
}

}  // namespace

TcpTransport::TcpTransport(std::chrono::milliseconds silence)
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), silence_(silence), scratch_(scratch_bytes) {
    if (epoll_ < 0) throw_error("epoll");
    Inherited::shared().add(epoll_);
}

TcpTransport::~TcpTransport() { close(); }

void TcpTransport::close() {
    if (epoll_ >= 0) Inherited::shared().close(std::exchange(epoll_, -1));
    scratch_ = {};
}

bool TcpTransport::progress() {
    std::array<epoll_event, most_events> events;
    const int count = epoll_wait(epoll_, events.data(), most_events, 0);
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<std::size_t>(i)];
        auto& link = *static_cast<TcpLink*>(event.data.ptr);
        link.readable_ |= (event.events & ~EPOLLOUT) != 0;
        link.hung_up_ |= (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
        link.writable_ |= (event.events & EPOLLOUT) != 0;
    }
    bool moved = false;
    for (TcpLink* link : links_) moved |= link->progress();
    return moved;
}

bool TcpTransport::arm() {
    if (const auto now = std::chrono::steady_clock::now(); now - looked_ >= silence_ / looks) {
        looked_ = now;
        for (TcpLink* link : links_) {
            if (link->fell_silent()) return false;
        }
    }
    return std::ranges::none_of(links_, [](const TcpLink* link) {
        return link->broken_.empty() && !link->refused_ &&
               (link->readable_ || (link->writable_ && !link->out_.empty()));
    });
}

bool TcpTransport::is_flushed() const {
    return std::ranges::all_of(
        links_, [](const TcpLink* link) { return link->out_.empty() || !link->broken_.empty(); });
}

std::size_t TcpMessages::fragment_bytes() const { return link_.fragment_bytes(); }
bool TcpMessages::can_send() { return link_.can_send(link_.messages_); }
void TcpMessages::send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
                       const std::optional<Copies>&) {
    link_.send(link_.messages_, data, bytes, call, may_borrow);
}
std::uint64_t TcpMessages::released() { return link_.released(link_.messages_); }
bool TcpMessages::can_receive() { return link_.messages_.receipts.empty(); }
const Call* TcpMessages::front() { return link_.front(link_.messages_); }
void TcpMessages::receive(const Target& target, const Call& call) {
    link_.receive(link_.messages_, target, call);
}
std::uint64_t TcpMessages::received() { return link_.received(link_.messages_); }
const std::string& TcpMessages::broken() const { return link_.broken_; }

TcpLink::TcpLink(std::shared_ptr<TcpTransport> transport, int socket, std::int32_t peer,
                 std::size_t fragment_bytes)
    : transport_(std::move(transport)),
      socket_(socket),
      peer_(peer),
      fragment_bytes_(fragment_bytes),
      most_ahead_(std::max<std::uint64_t>(most_ahead_bytes / fragment_bytes, window)) {
    Inherited::shared().add(socket_);
    try {
        set(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
        set(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
        set(socket_, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
        set(socket_, IPPROTO_TCP, TCP_KEEPINTVL, between_probes_s);
        set(socket_, IPPROTO_TCP, TCP_KEEPCNT, most_probes);
        epoll_event event{};
        event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
        event.data.ptr = this;
        if (epoll_ctl(transport_->epoll_, EPOLL_CTL_ADD, socket_, &event) != 0) {
            throw_error("epoll");
        }
        transport_->links_.push_back(this);
    } catch (...) {
        Inherited::shared().close(socket_);
        throw;
    }
}

TcpLink::~TcpLink() {
    std::erase(transport_->links_, this);
    // A fork may have a copy for a moment, so closing alone would not remove it from epoll.
    (void)epoll_ctl(transport_->epoll_, EPOLL_CTL_DEL, socket_, nullptr);
    Inherited::shared().close(socket_);
}

// ---------------------------------------------------------------------- sending

bool TcpLink::can_send(const Lane& lane) const {
    return broken_.empty() && !hung_up_ && lane.sent - lane.written < window &&
           lane.sent - lane.taken < most_ahead_;
}

void TcpLink::send(const std::byte* data, std::size_t bytes, const Call& call, bool may_borrow,
                   const std::optional<Copies>&) {
    send(collectives_, data, bytes, call, may_borrow);
}

void TcpLink::send(Lane& lane, const std::byte* data, std::size_t bytes, const Call& call,
                   bool may_borrow) {
    Header header{.call = call, .kind = lane.kind, .bytes = static_cast<std::uint32_t>(bytes)};
    header.taken = collectives_.acknowledged = collectives_.received;
    header.taken_messages = messages_.acknowledged = messages_.received;
    out_.push_back({header, data, {}});
    ++lane.sent;
    write();
    if (may_borrow || lane.written == lane.sent || out_.empty()) return;
    Frame& frame = out_.back();
    frame.copy.assign(data, data + bytes);
    frame.data = frame.copy.data();
}

std::uint64_t TcpLink::released(const Lane& lane) const {
    std::uint64_t count = lane.written;
    for (const Frame& frame : out_) {
        if (frame.header.kind != lane.kind) continue;
        if (frame.copy.empty()) break;
        ++count;
    }
    return count;
}

bool TcpLink::write() {
    bool moved = false;
    while (writable_ && !out_.empty()) {
        std::array<iovec, most_parts> parts;
        std::size_t count = 0;
        std::size_t skip = written_;
        std::size_t asked = 0;
        for (Frame& frame : out_) {
            if (count + 2 > parts.size()) break;
            const auto add = [&](const void* data, std::size_t bytes) {
                const std::size_t skipped = std::min(skip, bytes);
                skip -= skipped;
                if (bytes == skipped) return;
                // sendmsg() does not write there.
                auto* start = const_cast<std::byte*>(static_cast<const std::byte*>(data));
                parts[count++] = {start + skipped, bytes - skipped};
                asked += bytes - skipped;
            };
            add(&frame.header, sizeof frame.header);
            add(frame.data, frame.header.bytes);
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = count;
        const ssize_t sent = sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            writable_ = false;
            if (errno != EAGAIN && errno != ENOBUFS && errno != ENOMEM) failed(errno);
            return moved;
        }
        moved = moved || sent > 0;
        if (static_cast<std::size_t>(sent) < asked) writable_ = false;
        written_ += static_cast<std::size_t>(sent);
        while (!out_.empty()) {
            const Header& header = out_.front().header;
            const std::size_t bytes = sizeof header + header.bytes;
            if (written_ < bytes) break;
            written_ -= bytes;
            if (header.kind <= Kind::message) ++lane_of(header.kind).written;
            out_.pop_front();
        }
    }
    return moved;
}

// Notices overtake fragments.
void TcpLink::notify(Header header) {
    header.taken = collectives_.acknowledged = collectives_.received;
    header.taken_messages = messages_.acknowledged = messages_.received;
    auto place = out_.begin() + (written_ > 0 ? 1 : 0);
    place = std::find_if(place, out_.end(),
                         [](const Frame& frame) { return frame.header.kind <= Kind::message; });
    out_.insert(place, {header, nullptr, {}});
    write();
}

void TcpLink::give_up(const Verdict& verdict) {
    gave_up_ = true;
    if (!broken_.empty()) return;
    // A peer that knows of it receives nothing more, but a frame that has begun must be completed.
    const std::size_t begun = written_ > 0 ? 1 : 0;
    while (out_.size() > begun && out_.back().header.kind <= Kind::message) out_.pop_back();
    notify({.kind = Kind::given_up, .culprit = verdict.culprit, .fault = verdict.fault});
}

// ---------------------------------------------------------------------- receiving

const Call* TcpLink::front(const Lane& lane) const {
    if (!lane.unexpected.empty()) {
        const Unexpected& first = lane.unexpected.front();
        return first.complete || broken_.empty() ? &first.call : nullptr;
    }
    return frame_ && into_ == Into::unknown && frame_->kind == lane.kind ? &frame_->call : nullptr;
}

void TcpLink::receive(Lane& lane, const Target& target, const Call& call) {
    lane.receipts.push_back({target, call});
    match(lane);
    if (frame_ && frame_->kind == lane.kind && into_ == Into::receipt) read();
}

void TcpLink::match(Lane& lane) {
    while (!lane.receipts.empty() && !lane.unexpected.empty() && lane.unexpected.front().complete) {
        const Receipt receipt = lane.receipts.front();
        const Unexpected& first = lane.unexpected.front();
        try {
            require_same(peer_, first.call, first.data.size(), receipt.call, receipt.target.bytes);
        } catch (...) {
            refused_ = true;
            throw;
        }
        const Target& target = receipt.target;
        if (target.own != nullptr) {
            combine(receipt.call.reduction, receipt.call.dtype, target.result, target.own,
                    first.data.data(), target.bytes / size_of(receipt.call.dtype));
        } else if (target.bytes > 0) {
            std::memcpy(target.result, first.data.data(), target.bytes);
        }
        lane.receipts.pop_front();
        lane.unexpected.pop_front();
        ++lane.received;
    }
    if (!lane.unexpected.empty() || lane.receipts.empty() || !frame_ || into_ != Into::unknown ||
        frame_->kind != lane.kind) {
        return;
    }
    const Receipt& receipt = lane.receipts.front();
    try {
        require_same(peer_, frame_->call, frame_->bytes, receipt.call, receipt.target.bytes);
    } catch (...) {
        refused_ = true;
        throw;
    }
    into_ = Into::receipt;
    target_ = receipt.target;
    kept_back_ = false;
}

void TcpLink::keep() {
    Lane& lane = lane_of(frame_->kind);
    lane.unexpected.push_back({frame_->call, RecycledVector<std::byte>(frame_->bytes)});
    into_ = Into::unexpected;
    kept_back_ = false;
}

std::uint64_t TcpLink::received(Lane& lane) {
    const std::uint64_t at_once = std::max<std::uint64_t>(most_ahead_ / 4, 1);
    if (lane.received - lane.acknowledged >= at_once && broken_.empty() && !gave_up_ && !refused_) {
        notify({.kind = Kind::taken});
    }
    return lane.received;
}

bool TcpLink::progress() {
    if (!broken_.empty()) return false;
    bool moved = false;
    if (frame_ && into_ == Into::unknown) {
        // Most often the group asks for it soon, and then it needs no copy.
        if (kept_back_) {
            keep();
            moved = true;
        }
        kept_back_ = !kept_back_ && frame_ && into_ == Into::unknown;
        moved |= kept_back_;
    }
    moved |= read();
    moved |= write();
    return moved;
}

bool TcpLink::read() {
    bool moved = false;
    while (!refused_ && broken_.empty()) {
        consume();
        if (frame_ && into_ == Into::unknown) break;
        if (!readable_) break;
        std::array<iovec, 2> parts{};
        std::size_t count = 0;
        std::size_t asked = 0;
        std::size_t direct = 0;
        if (frame_) {
            parts[count] = destination();
            direct = parts[count++].iov_len;
            asked = direct;
        }
        if (!frame_ || direct == frame_->bytes - done_) {
            // After a long fragment, read only the next header: what follows it needs no copy then.
            const std::size_t most = direct > stage_bytes ? sizeof(Header) : stage_bytes;
            parts[count++] = {stage_.data() + staged_to_,
                              std::min(most, stage_.size() - staged_to_)};
            asked += parts[count - 1].iov_len;
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = count;
        const ssize_t got = recvmsg(socket_, &message, MSG_DONTWAIT);
        if (got < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) {
                readable_ = false;
            } else {
                failed(errno);
                fail();
            }
            break;
        }
        if (got == 0) {
            fail();
            break;
        }
        moved = true;
        const auto bytes = static_cast<std::size_t>(got);
        if (bytes < asked && !hung_up_) readable_ = false;
        staged_to_ += bytes - std::min(bytes, direct);
        if (frame_) landed(std::min(bytes, direct));
    }
    return moved;
}

iovec TcpLink::destination() {
    const std::size_t left = frame_->bytes - done_;
    std::byte* scratch = transport_->scratch_.data();
    const std::size_t room = transport_->scratch_.size();
    if (into_ == Into::nowhere) return {scratch, std::min(left, room)};
    if (into_ == Into::unexpected) {
        return {lane_of(frame_->kind).unexpected.back().data.data() + done_, left};
    }
    if (!reduces()) return {target_.result + done_, left};
    std::memcpy(scratch, carry_.data(), carried_);
    return {scratch + carried_, std::min(left, room - carried_)};
}

void TcpLink::landed(std::size_t bytes) {
    done_ += bytes;
    if (reduces()) {
        const Call& call = frame_->call;
        const std::size_t element = size_of(call.dtype);
        const std::size_t whole = (carried_ + bytes) / element;
        const std::size_t start = done_ - bytes - carried_;
        const std::byte* scratch = transport_->scratch_.data();
        carried_ = carried_ + bytes - whole * element;
        combine(call.reduction, call.dtype, target_.result + start, target_.own + start, scratch,
                whole);
        std::memcpy(carry_.data(), scratch + whole * element, carried_);
    }
    if (done_ < frame_->bytes) return;
    Lane& lane = lane_of(frame_->kind);
    frame_.reset();
    if (into_ == Into::receipt) {
        lane.receipts.pop_front();
        ++lane.received;
    } else if (into_ == Into::unexpected) {
        lane.unexpected.back().complete = true;
        match(lane);
    }
}

void TcpLink::deliver(const std::byte* data, std::size_t bytes) {
    const iovec place = destination();
    if (bytes > 0) std::memcpy(place.iov_base, data, bytes);
    landed(bytes);
}

void TcpLink::consume() {
    while (true) {
        const std::size_t staged = staged_to_ - staged_from_;
        if (!frame_) {
            if (staged < sizeof(Header)) {
                std::memmove(stage_.data(), stage_.data() + staged_from_, staged);
                staged_to_ = staged;
                staged_from_ = 0;
                return;
            }
            Header header;
            std::memcpy(&header, stage_.data() + staged_from_, sizeof header);
            staged_from_ += sizeof header;
            begin(header);
            continue;
        }
        if (into_ == Into::unknown) {
            if (staged == 0) staged_from_ = staged_to_ = 0;
            return;
        }
        const std::size_t bytes = std::min<std::size_t>(staged, frame_->bytes - done_);
        const std::byte* data = stage_.data() + staged_from_;
        staged_from_ += bytes;
        deliver(data, bytes);
        if (frame_) {
            staged_from_ = staged_to_ = 0;  // all of it is delivered
            return;
        }
    }
}

void TcpLink::begin(const Header& header) {
    const auto kind = static_cast<std::uint32_t>(header.kind);
    if (header.kind < Kind::collective || header.kind > Kind::left ||
        header.fault > Fault::disagrees) {
        refuse("a frame", "one of kind " + std::to_string(kind) + " and " +
                              std::to_string(static_cast<std::uint32_t>(header.fault)));
    }
    accept(header);
    const bool fragment = header.kind <= Kind::message;
    const std::size_t most = fragment ? fragment_bytes_ : 0;
    if (header.bytes > most || (fragment && !is_possible(header.call))) {
        refuse("a frame of kind " + std::to_string(kind) + " and at most " + std::to_string(most) +
                   " bytes",
               std::to_string(header.bytes) + " bytes for " + describe(header.call));
    }
    if (!fragment) return;
    Lane& lane = lane_of(header.kind);
    if (lane.arrived - lane.acknowledged >= most_ahead_) {
        refuse("at most " + std::to_string(most_ahead_) + " fragments ahead of those acknowledged",
               "one more in " + describe(header.call));
    }
    ++lane.arrived;
    frame_ = header;
    done_ = 0;
    carried_ = 0;
    kept_back_ = false;
    into_ = ending_ || gave_up_ ? Into::nowhere : Into::unknown;
    if (into_ == Into::unknown) match(lane);
}

void TcpLink::accept(const Header& header) {
    if (header.taken > collectives_.sent || header.taken_messages > messages_.sent) {
        refuse("at most " + std::to_string(collectives_.sent) + " fragments taken, and " +
                   std::to_string(messages_.sent) + " of messages",
               std::to_string(header.taken) + " and " + std::to_string(header.taken_messages));
    }
    collectives_.taken = std::max(collectives_.taken, header.taken);
    messages_.taken = std::max(messages_.taken, header.taken_messages);
    if (header.kind == Kind::given_up) verdict_ = Verdict{header.culprit, header.fault};
    left_ = left_ || header.kind == Kind::left;
}

// ---------------------------------------------------------------------- the end

// What the peer sent before is still read.
void TcpLink::failed(int error) {
    if (error_ == 0) error_ = error;
    readable_ = true;
    hung_up_ = true;
}

void TcpLink::fail() {
    const std::string rank = "rank " + std::to_string(peer_);
    broken_ = left_ ? rank + " has left the group"
                    : rank + " has ended, or cannot be reached any more (" +
                          (error_ == 0 ? "it closed the connection"
                                       : std::generic_category().message(error_)) +
                          ")";
}

// Keepalive sends no probes while data is unacknowledged. TCP_USER_TIMEOUT would end such a
// connection, but also that to a peer which is only late: it takes no more, and its host answers.
bool TcpLink::fell_silent() {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    if (!broken_.empty() || getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) {
        return false;
    }
    const std::chrono::milliseconds answered(info.tcpi_last_ack_recv);
    const std::chrono::milliseconds sent(info.tcpi_last_data_sent);  // or sent again
    const std::chrono::microseconds again(info.tcpi_rto);
    const bool ignored = answered - sent >= transport_->silence_ / 4;
    const bool cut_off_here = 2 * sent > 3 * again;  // sending again has failed on this host
    // Of a window that is closed, or of data that could not be sent at all.
    const bool no_probe_answered = info.tcpi_probes >= most_probes;
    if (answered < transport_->silence_ ||
        !(info.tcpi_unacked > 0 ? ignored || cut_off_here : no_probe_answered)) {
        return false;
    }
    failed(ETIMEDOUT);
    fail();
    return true;
}

void TcpLink::refuse(const std::string& expected, const std::string& found) {
    refused_ = true;
    throw faulty(peer_, expected, found);
}

// Whatever arrives from here on is dropped: the memory of receives may be gone.
void TcpLink::end() {
    if (std::exchange(ending_, true)) return;
    if (frame_) into_ = Into::nowhere;
    for (Lane* lane : {&collectives_, &messages_}) {
        lane->receipts.clear();
        lane->unexpected.clear();
    }
    if (broken_.empty() && !gave_up_) notify({.kind = Kind::left});
}

// A socket that is closed with unread data, or that receives data later, is reset, and the last
// writes to it may be lost. So it is closed only once the peer's host has all of them, or the peer
// knows why this rank has given up.
bool TcpLink::ended() {
    if (!broken_.empty() || refused_ || left_) return true;
    if (gave_up_) return verdict_.has_value();
    int unacknowledged = 0;
    if (ioctl(socket_, SIOCOUTQ, &unacknowledged) != 0) return true;
    return out_.empty() && unacknowledged == 0;
}

}  // namespace syncline
