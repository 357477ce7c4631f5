#include "group.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace syncline {

namespace {

// Larger vectors take a network milliseconds. Polling all that time would take processors from
// threads that compute, and from the kernel, which needs one to move the data.
constexpr std::size_t bulk_bytes = 1 << 20;
constexpr Group::Patience bulk_patience{std::chrono::nanoseconds(0), std::chrono::microseconds(20)};
// This many polls take as long as one pass over everything.
constexpr int polls_a_pass = 16;
// How long a closing group waits until its peers have its last notice.
constexpr std::chrono::seconds shutdown_grace{2};
constexpr std::chrono::seconds longest_flush{30};  // after a failure
constexpr std::chrono::milliseconds flush_interval{1};
// How long a rank that blames a silent one waits for its answer: the silent one may itself wait.
constexpr std::chrono::milliseconds answer_timeout{500};
constexpr std::chrono::microseconds poll_interval{50};

std::string listed(const std::vector<std::int32_t>& ranks) {
    std::string text;
    for (const std::int32_t rank : ranks) {
        text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return text;
}

}  // namespace

void Operation::begin_with(Request request) {
    request_ = std::move(request);
    element_ = size_of(request_.call.dtype);
    const auto blocks = static_cast<std::size_t>(request_.program->blocks());
    block_elements_ = request_.call.count / blocks;
    rest_elements_ = request_.call.count % blocks;
    through_.assign(request_.program->transfers().size(), 0);
    set_done(false);
    left_ = 0;
    for (const Transfer& transfer : request_.program->transfers()) {
        left_ += begin(transfer) < end(transfer) ? 1 : 0;
    }
    direct_ = request_.output != nullptr && writes_output_whole();
}

bool Operation::writes_output_whole() const {
    const Program& program = *request_.program;
    const std::size_t first = request_.result_start * element_;
    const std::size_t last = request_.result_stop * element_;
    for (std::int32_t block = 0; block < program.blocks(); ++block) {
        const bool inside = offset(block) < last && offset(block + 1) > first;
        if (inside && !program.changes(block)) return false;
    }
    return std::ranges::all_of(program.transfers(), [&](const Transfer& transfer) {
        return (begin(transfer) >= first && end(transfer) <= last) || end(transfer) <= first ||
               begin(transfer) >= last;
    });
}

std::byte* Operation::place(std::size_t from) const {
    const std::size_t first = request_.result_start * element_;
    const bool is_output = direct_ && from >= first && from < request_.result_stop * element_;
    return is_output ? request_.output + (from - first) : request_.work + from;
}

// The same as Schedule.block_offsets. It is called several times a fragment, and with small
// fragments each division is noticeable.
std::size_t Operation::offset(std::int32_t block) const {
    const auto index = static_cast<std::size_t>(block);
    const std::size_t whole = index * block_elements_;
    if (rest_elements_ == 0) return whole * element_;
    const auto blocks = static_cast<std::size_t>(request_.program->blocks());
    return (whole + index * rest_elements_ / blocks) * element_;
}

std::size_t Operation::begin(const Transfer& transfer) const {
    return offset(transfer.block_start);
}

std::size_t Operation::end(const Transfer& transfer) const { return offset(transfer.block_stop); }

bool Operation::passed(const std::vector<std::uint32_t>& earlier, std::size_t from,
                       std::size_t to) const {
    return std::ranges::all_of(earlier, [&](std::uint32_t number) {
        const Transfer& transfer = request_.program->transfers()[number];
        const std::size_t first = begin(transfer);
        const std::size_t last = std::min(to, end(transfer));
        return std::max(from, first) >= last || through_[number] >= last - first;
    });
}

bool Operation::open(const std::vector<std::uint32_t>& transfers) const {
    return std::ranges::any_of(transfers, [&](std::uint32_t number) {
        const Transfer& transfer = request_.program->transfers()[number];
        return through_[number] < end(transfer) - begin(transfer);
    });
}

void Operation::finish() {
    const std::size_t count = request_.result_stop - request_.result_start;
    std::byte* result = place(request_.result_start * element_);
    if (request_.call.reduction == Reduction::average && count > 0) {
        divide(request_.call.dtype, result, count,
               static_cast<std::uint32_t>(request_.program->ranks()));
    }
    if (request_.output != nullptr && !direct_ && count > 0) {
        std::memcpy(request_.output, result, count * element_);
    }
}

namespace {

std::vector<Link*> carriers_of_messages(const std::vector<std::unique_ptr<Link>>& links) {
    std::vector<Link*> found;
    for (const auto& link : links) found.push_back(link == nullptr ? nullptr : link->messages());
    return found;
}

}  // namespace

Group::Group(std::int32_t rank, std::vector<std::unique_ptr<Link>> links,
             std::unique_ptr<Sleeper> sleeper, std::shared_ptr<Transport> transport,
             Patience patience)
    : rank_(rank),
      mailbox_(carriers_of_messages(links)),
      sleeper_(std::move(sleeper)),
      transport_(std::move(transport)),
      patience_(patience) {
    for (auto& link : links) links_.push_back({std::move(link), {}, {}, {}, {}});
}

Group::~Group() { close(); }

void Group::close() {
    if (forked()) return;
    {
        const std::lock_guard lock(mutex_);
        if (closing_) return;  // the sleeper's descriptor may be closed by now, and reused
        closing_ = true;
        if (!failure_) failure_ = {{-1, Fault::lost}, "the group was closed"};
    }
    work_.notify_all();
    done_.notify_all();
    sleeper_->wake();
    if (progress_thread_.joinable()) progress_thread_.join();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return !driven_; });  // another thread may drive, and be in the sleeper
    mailbox_.close();
    const auto ended = [](const Peer& peer) { return peer.link == nullptr || peer.link->ended(); };
    for (const Peer& peer : links_) {
        if (peer.link != nullptr) peer.link->end();
    }
    const auto deadline = Clock::now() + shutdown_grace;
    while (!std::ranges::all_of(links_, ended) && Clock::now() < deadline) {
        if (!flush()) std::this_thread::sleep_for(poll_interval);
    }
    for (Peer& peer : links_) peer.link.reset();
}

Handle Group::start(Operation::Request request, bool blocking) {
    if (forked()) {
        throw Forked("rank " + std::to_string(rank_) + ": a fork of its process called " +
                     describe(request.call));
    }
    std::unique_lock lock(mutex_);
    if (failure_) throw_failure();
    // Making a new one would make a small collective take a tenth longer.
    if (last_ == nullptr || last_.use_count() > 1) last_ = std::make_shared<Operation>();
    const Handle operation = last_;
    operation->begin_with(std::move(request));
    operation->request_.call.sequence = ++sequence_;
    if (operation->left_ == 0) {
        operation->finish();
        operation->set_done(true);
        return operation;
    }
    try {
        enlist(operation);
        if (driven_) {
            progress();
            require_peers();                              // the driver may sleep
            if (transport_ != nullptr) sleeper_->wake();  // what it waits for may have passed
        } else if (blocking) {
            drive(lock, operation.get(), std::nullopt);
        } else {
            progress();
            if (!operation->done()) wake_progress_thread();
        }
    } catch (...) {  // its memory may be in use, so the caller gets the operation
        fail_for_exception();
    }
    return operation;
}

void Group::enlist(const Handle& operation) {
    const Program& program = *operation->request_.program;
    for (std::int32_t rank = 0; rank < ranks(); ++rank) {
        Peer& peer = links_[static_cast<std::size_t>(rank)];
        if (!program.sends_to(rank).empty()) peer.sends.waiting.push_back({operation, 0, 0});
        if (!program.receives_from(rank).empty())
            peer.receives.waiting.push_back({operation, 0, 0});
    }
    active_.push_back(operation);
}

void Group::post(const MessageHandle& message, void (Mailbox::*begin)(const MessageHandle&)) {
    if (forked()) {
        throw Forked("rank " + std::to_string(rank_) + ": a fork of its process called " +
                     describe(message->call()));
    }
    const std::lock_guard lock(mutex_);
    if (failure_) throw_failure();
    try {
        (mailbox_.*begin)(message);
        progress();
        if (driven_) {
            require_peers();                              // the driver may sleep
            if (transport_ != nullptr) sleeper_->wake();  // what it waits for may have passed
        } else if (!message->done()) {
            wake_progress_thread();
        }
    } catch (...) {  // as in start()
        fail_for_exception();
    }
}

void Group::wait(const std::shared_ptr<Task>& task, Clock::time_point deadline, bool gives_up) {
    if (task->done()) return;
    if (forked()) {
        throw Forked("rank " + std::to_string(rank_) + ": a fork of its process waited for " +
                     describe(task->call()));
    }
    std::unique_lock lock(mutex_);
    while (!task->done()) {
        if (failure_) throw_failure();
        bool in_time = true;
        if (driven_) {
            in_time = done_.wait_until(lock, deadline) == std::cv_status::no_timeout ||
                      Clock::now() < deadline;
        } else {
            in_time = drive(lock, task.get(), deadline);
        }
        if (!in_time && !task->done() && !failure_) {
            std::string what;
            try {
                what = waited_for(*task);
                if (gives_up) give_up_on(*task);
            } catch (...) {
                fail_for_exception();
                throw_failure();
            }
            throw Timeout(gives_up ? failure_->what : what);
        }
    }
}

bool Group::idle() {
    if (forked()) return true;
    const std::lock_guard lock(mutex_);
    return all_done();
}

bool Group::failed() {
    if (forked()) return true;
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
}

std::vector<std::int32_t> Group::cut_off() {
    std::vector<std::int32_t> found;
    if (forked()) return found;
    const std::lock_guard lock(mutex_);
    if (!driven_ && !closing_) progress();  // nobody polls while nothing is in flight
    for (const Peer& peer : links_) {
        if (peer.link == nullptr || !peer.link->cut_off()) continue;
        found.push_back(static_cast<std::int32_t>(&peer - links_.data()));
    }
    return found;
}

void Group::lose(std::int32_t rank, const std::string& what) {
    if (forked()) return;
    const std::lock_guard lock(mutex_);
    if (closing_) return;  // the sleeper's descriptor may be closed by now, and reused
    Peer& peer = links_.at(static_cast<std::size_t>(rank));
    try {
        poll_verdict(rank);  // why it left, if it said so
    } catch (...) {
        fail_for_exception();
    }
    if (peer.lost.empty()) peer.lost = what;
    any_lost_ = true;
    if (!driven_) {
        progress();
        require_peers();
    }
    sleeper_->wake();
}

void Group::require_peers() {
    if (failure_) return;
    try {
        find_missing();
    } catch (...) {
        fail_for_exception();
    }
}

void Group::find_missing() {
    for (std::int32_t rank = 0; rank < ranks(); ++rank) poll_verdict(rank);
    if (!any_lost_) return;
    // A rank that waits in vain for this one or for several knows less than one that names another.
    for (const bool vague : {false, true}) {
        for (std::int32_t rank = 0; rank < ranks(); ++rank) {
            const Peer& peer = links_[static_cast<std::size_t>(rank)];
            if (peer.lost.empty() || names_no_other(peer) != vague) continue;
            for (const Handle& operation : active_) {
                if (!misses(*operation, rank)) continue;
                if (!vague || silent_in(*operation).empty()) throw loss(rank, operation->call());
                give_up_on(*operation);  // this rank waits for another itself
                return;
            }
        }
    }
    const Message* message = mailbox_.missing(
        [&](std::int32_t rank) { return !links_[static_cast<std::size_t>(rank)].lost.empty(); });
    if (message == nullptr) return;
    const auto lost =
        std::ranges::find_if(links_, [](const Peer& each) { return !each.lost.empty(); });
    throw loss(message->peer() == any_rank ? static_cast<std::int32_t>(lost - links_.begin())
                                           : message->peer(),
               message->call());
}

bool Group::names_no_other(const Peer& peer) const {
    return peer.verdict && peer.verdict->fault == Fault::silent &&
           (peer.verdict->culprit == rank_ || peer.verdict->culprit < 0);
}

PeerFailure Group::loss(std::int32_t rank, const Call& call) const {
    const Peer& peer = links_.at(static_cast<std::size_t>(rank));
    const Verdict verdict = peer.verdict.value_or(Verdict{rank, Fault::lost});
    return {verdict.culprit, verdict.fault, peer.lost + ", in " + describe(call)};
}

void Group::poll_verdict(std::int32_t rank) {
    Peer& peer = links_[static_cast<std::size_t>(rank)];
    if (peer.link == nullptr || !peer.lost.empty()) return;
    const std::optional<Verdict> verdict = peer.link->given_up();
    if (!verdict) return;
    const std::int32_t culprit = verdict->culprit;
    if (culprit >= ranks() || culprit < (verdict->fault == Fault::disagrees ? 0 : -1) ||
        verdict->fault > Fault::disagrees) {
        throw faulty(rank, "a rank below " + std::to_string(ranks()) + " that has failed",
                     std::to_string(culprit));
    }
    peer.verdict = verdict;
    any_lost_ = true;
    peer.lost = "rank " + std::to_string(rank) + " has given up";
    if (verdict->fault == Fault::disagrees) {
        peer.lost += ": rank " + std::to_string(culprit) + " called another collective";
    } else if (culprit == rank_) {
        peer.lost += verdict->fault == Fault::silent ? ": it waited in vain for this rank"
                                                     : ": it found this rank at fault";
    } else if (culprit >= 0) {
        const std::string& known = links_[static_cast<std::size_t>(culprit)].lost;
        const char* fault = verdict->fault == Fault::silent ? " is silent" : " has failed";
        peer.lost += ": " + (known.empty() ? "rank " + std::to_string(culprit) + fault : known);
    }
}

bool Group::misses(const Operation& operation, std::int32_t rank) const {
    return awaits(operation, rank) || operation.open(operation.request_.program->sends_to(rank));
}

bool Group::awaits(const Operation& operation, std::int32_t rank) const {
    const Peer& peer = links_[static_cast<std::size_t>(rank)];
    if (peer.link == nullptr) return false;
    const Program& program = *operation.request_.program;
    // What has arrived and waits for its turn, behind another rank's, is not missing.
    const bool silent = !peer.link->has_arrived() && operation.open(program.receives_from(rank));
    const bool full = !peer.link->can_send() || !peer.sends.under_way.empty();
    return silent || (full && operation.open(program.sends_to(rank)));
}

void Group::fail(std::int32_t rank, Fault fault, std::string what) {
    if (failure_) return;
    failure_ = {{rank, fault}, std::move(what)};
    done_.notify_all();
    work_.notify_all();
    sleeper_->wake();  // another thread may drive
    for (const Peer& peer : links_) {
        if (peer.link == nullptr) continue;
        try {
            peer.link->give_up(failure_->verdict);
        } catch (const std::bad_alloc&) {
            // It will see that the connection ends.
        }
    }
    flush_until_ = Clock::now() + longest_flush;
    if (flushes()) wake_progress_thread();
}

void Group::give_up_on(const Task& task) {
    const std::vector<std::int32_t> silent = silent_in(task);
    fail(silent.size() == 1 ? silent[0] : -1, Fault::silent, waited_for(task));
    name_silent(silent);
}

void Group::name_silent(std::vector<std::int32_t> silent) {
    if (ranks() == 2) return;
    try {
        const std::vector<std::int32_t> blamed = silent;
        std::vector<bool> known(links_.size());
        known.at(static_cast<std::size_t>(rank_)) = true;
        for (const std::int32_t rank : silent) known.at(static_cast<std::size_t>(rank)) = true;
        const auto deadline = Clock::now() + answer_timeout;
        while (!silent.empty() && Clock::now() < deadline) {
            if (transport_ != nullptr) transport_->progress();
            std::vector<std::int32_t> next;
            for (const std::int32_t rank : silent) {
                const auto verdict = links_[static_cast<std::size_t>(rank)].link->given_up();
                const std::int32_t culprit = verdict ? verdict->culprit : rank;
                if (!verdict) {
                    next.push_back(rank);
                } else if (culprit >= 0 && !known.at(static_cast<std::size_t>(culprit))) {
                    known[static_cast<std::size_t>(culprit)] = true;
                    next.push_back(culprit);
                }
            }
            silent = std::move(next);
            std::this_thread::sleep_for(poll_interval);
        }
        if (silent.size() != 1 || silent == blamed) return;
        failure_->verdict.culprit = silent[0];
        failure_->what += ", because rank " + std::to_string(silent[0]) + " is silent";
    } catch (const std::exception&) {
        // This rank has failed already; it only names the ranks that it waits for itself.
    }
}

void Group::fail_for_exception() {
    try {
        try {
            throw;
        } catch (const PeerFailure& failure) {
            if (failure_) return;
            fail(failure.rank, failure.fault, failure.what());
            const bool third = failure.rank >= 0 && failure.rank != rank_;
            if (failure.fault == Fault::silent && third) name_silent({failure.rank});
        } catch (const std::exception& error) {  // such as std::bad_alloc
            fail(-1, Fault::lost,
                 "rank " + std::to_string(rank_) + " cannot go on: " + error.what());
        }
    } catch (const std::bad_alloc&) {
        fail(-1, Fault::lost, "out of memory");  // so short that it takes none
    }
}

void Group::throw_failure() const {
    throw PeerFailure(failure_->verdict.culprit, failure_->verdict.fault, failure_->what);
}

bool Group::progress() {
    if (failure_) return false;
    bool moved = false;
    try {
        for (bool more = true; more;) {
            more = transport_ != nullptr && transport_->progress();
            if (mailbox_.progress()) {
                more = true;
                done_.notify_all();
            }
            for (Peer& peer : links_) {
                if (peer.link == nullptr) continue;
                more |= progress_sends(peer);
                more |= progress_receives(peer);
                if (peer.lost.empty() && !peer.link->broken().empty()) {
                    poll_verdict(
                        static_cast<std::int32_t>(&peer - links_.data()));  // why, if it said so
                    if (peer.lost.empty()) peer.lost = peer.link->broken();
                    any_lost_ = true;
                }
            }
            moved |= more;
        }
    } catch (...) {
        fail_for_exception();
    }
    return moved;
}

bool Group::flushes() const {
    return !closing_ && transport_ != nullptr && !transport_->is_flushed() &&
           Clock::now() < flush_until_;
}

bool Group::flush() {
    try {
        return transport_ != nullptr && transport_->progress();
    } catch (const std::exception&) {
        // Memory has run out, or a peer is faulty: it will see that the connection ends.
        return false;
    }
}

bool Group::progress_sends(Peer& peer) {
    Side& side = peer.sends;
    bool moved = retire(side, peer.link->released());
    while (!side.waiting.empty()) {
        Cursor& cursor = side.waiting.front();
        const Operation& operation = *cursor.operation;
        const Program& program = *operation.request_.program;
        const auto& list = program.sends_to(static_cast<std::int32_t>(&peer - links_.data()));
        if (cursor.index == list.size()) {
            side.waiting.pop_front();
            continue;
        }
        const std::uint32_t number = list[cursor.index];
        const Transfer& transfer = program.transfers()[number];
        const std::size_t from = operation.begin(transfer) + cursor.offset;
        const std::size_t end = operation.end(transfer);
        if (from == end) {
            ++cursor.index;
            cursor.offset = 0;
            continue;
        }
        const std::size_t to = std::min(end, from + peer.link->fragment_bytes());
        if (!peer.link->can_send() || !operation.passed(transfer.after_receives, from, to)) break;
        const std::byte* source =
            transfer.fresh ? operation.request_.input + from : operation.place(from);
        side.under_way.push_back({cursor.operation.get(), number, to - from});
        const bool changes = transfer.exchanged && (operation.in_place() || !transfer.fresh);
        std::optional<Copies> copies;
        if (transfer.copy_of) copies = {*transfer.copy_of, cursor.offset};
        peer.link->send(source, to - from, operation.call(), !changes, copies);
        cursor.offset += to - from;
        retire(side, peer.link->released());
        return true;
    }
    return moved;
}

bool Group::progress_receives(Peer& peer) {
    Side& side = peer.receives;
    bool moved = retire(side, peer.link->received());
    while (!side.waiting.empty()) {
        Cursor& cursor = side.waiting.front();
        const Operation& operation = *cursor.operation;
        const Program& program = *operation.request_.program;
        const auto& list = program.receives_from(static_cast<std::int32_t>(&peer - links_.data()));
        if (cursor.index == list.size()) {
            side.waiting.pop_front();
            continue;
        }
        const std::uint32_t number = list[cursor.index];
        const Transfer& transfer = program.transfers()[number];
        const std::size_t from = operation.begin(transfer) + cursor.offset;
        const std::size_t end = operation.end(transfer);
        if (from == end) {
            ++cursor.index;
            cursor.offset = 0;
            continue;
        }
        const std::size_t to = std::min(end, from + peer.link->fragment_bytes());
        if (!peer.link->can_receive() || !operation.passed(transfer.after_receives, from, to)) {
            break;
        }
        // An out-of-place receive overwrites nothing, so earlier sends need not be done.
        const bool overwrites = operation.in_place() || !transfer.fresh;
        if (overwrites && !operation.passed(transfer.after_sends, from, to)) break;
        std::byte* target = operation.place(from);
        const std::byte* own = transfer.fresh ? operation.request_.input + from : target;
        side.under_way.push_back({cursor.operation.get(), number, to - from});
        peer.link->receive({target, transfer.action == Action::reduce ? own : nullptr, to - from},
                           operation.call());
        cursor.offset += to - from;
        retire(side, peer.link->received());
        return true;
    }
    return moved;
}

bool Group::retire(Side& side, std::uint64_t count) {
    bool moved = false;
    while (side.retired < count) {
        const Piece piece = side.under_way.front();
        side.under_way.pop_front();
        ++side.retired;
        complete(piece);
        moved = true;
    }
    return moved;
}

void Group::complete(const Piece& piece) {
    Operation& operation = *piece.operation;
    const Transfer& transfer = operation.request_.program->transfers()[piece.transfer];
    operation.through_[piece.transfer] += piece.bytes;
    if (operation.through_[piece.transfer] < operation.end(transfer) - operation.begin(transfer)) {
        return;
    }
    if (--operation.left_ > 0) return;
    operation.finish();
    operation.set_done(true);
    done_.notify_all();
    std::erase_if(active_, [&](const Handle& handle) { return handle.get() == &operation; });
}

Group::Patience Group::patience() const {
    const bool bulk = transport_ != nullptr && std::ranges::any_of(active_, [](const Handle& each) {
                          return each->call().count * each->element_ > bulk_bytes;
                      });
    return bulk ? bulk_patience : patience_;
}

bool Group::has_arrivals() {
    return mailbox_.has_arrived() || std::ranges::any_of(links_, [](const Peer& peer) {
               return peer.link != nullptr && peer.link->has_arrived();
           });
}

bool Group::drive(std::unique_lock<std::mutex>& lock, const Task* until,
                  std::optional<Clock::time_point> deadline) {
    driven_ = true;
    bool in_time = true;
    try {
        in_time = drive_on(lock, until, deadline);
    } catch (...) {
        if (!lock.owns_lock()) lock.lock();
        fail_for_exception();
    }
    driven_ = false;
    if (closing_) done_.notify_all();
    // Threads that wait for other tasks, and tasks that nobody waits for yet, need another driver.
    const std::size_t own = !deadline && until != nullptr && !until->done() ? 1 : 0;
    if (until != nullptr && (active_.size() > own || !mailbox_.idle()) && !failure_) {
        done_.notify_all();
        wake_progress_thread();
    }
    if (failure_ && flushes()) wake_progress_thread();
    return in_time;
}

bool Group::drive_on(std::unique_lock<std::mutex>& lock, const Task* until,
                     std::optional<Clock::time_point> deadline) {
    const auto finished = [&] {
        return failure_ || closing_ || (until != nullptr ? until->done() : all_done());
    };
    bool quiet = false;  // nothing has arrived since:
    Clock::time_point quiet_since{};
    while (!finished()) {
        if (progress()) {
            quiet = false;
            continue;
        }
        require_peers();
        if (finished()) break;
        const auto now = Clock::now();
        if (!quiet) quiet_since = now;
        quiet = true;
        const Patience patient = patience();
        const bool spins = now - quiet_since < patient.spin;
        if (deadline ? now >= *deadline : !spins) return false;
        if (spins) {
            const bool pauses = now - quiet_since < patient.pause;
            for (int poll = 0; pauses && poll < polls_a_pass && !has_arrivals(); ++poll) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            }
            // Let others start collectives, or fail the group.
            lock.unlock();
            if (!pauses) sched_yield();
            lock.lock();
            continue;
        }
        sleeper_->announce();
        if (progress() || finished() || !sleeper_->may_sleep()) {
            sleeper_->withdraw();
            quiet = false;
            continue;
        }
        lock.unlock();
        sleeper_->sleep(*deadline);
        lock.lock();
        quiet = false;
    }
    return true;
}

void Group::wake_progress_thread() {
    if (driven_) return;
    try {
        if (!progress_thread_.joinable())
            progress_thread_ = std::thread([this] { run_progress(); });
    } catch (const std::system_error&) {  // too many threads
        return fail_for_exception();
    }
    work_.notify_one();
}

void Group::run_progress() {
    std::unique_lock lock(mutex_);
    while (true) {
        work_.wait(lock,
                   [&] { return closing_ || (!driven_ && (failure_ ? flushes() : !all_done())); });
        if (closing_) return;
        if (!failure_) {
            drive(lock, nullptr, Clock::time_point::max());
        } else if (!flush()) {
            lock.unlock();
            std::this_thread::sleep_for(flush_interval);
            lock.lock();
        }
    }
}

std::string Group::waited_for(const Task& task) const {
    const std::string where =
        "rank " + std::to_string(rank_) + " waited in vain in " + describe(task.call()) + ": ";
    const auto* message = dynamic_cast<const Message*>(&task);
    if (message != nullptr && message->peer() == any_rank) {
        return where + "no rank sent what it should within the timeout";
    }
    const std::string missed = " did not send, or take, what it should within the timeout";
    std::vector<std::int32_t> ranks = silent_in(task);
    if (ranks.empty()) ranks = awaited(task);
    if (!ranks.empty()) return where + "rank " + listed(ranks) + missed;
    // What it waits for has arrived, and is behind an earlier collective with the same ranks.
    for (const Handle& earlier : active_) {
        const std::vector<std::int32_t> before = awaited(*earlier);
        if (!before.empty()) {
            return where + "rank " + listed(before) + missed + " in " + describe(earlier->call()) +
                   ", which comes before";
        }
    }
    return where + "every rank has sent what it should, but this rank did not get to it";
}

std::vector<std::int32_t> Group::awaited(const Task& task) const {
    if (const auto* message = dynamic_cast<const Message*>(&task)) {
        if (message->peer() == any_rank) return {};
        return {message->peer()};
    }
    const auto& operation = dynamic_cast<const Operation&>(task);
    std::vector<std::int32_t> found;
    for (std::int32_t rank = 0; rank < ranks(); ++rank) {
        if (awaits(operation, rank)) found.push_back(rank);
    }
    return found;
}

std::vector<std::int32_t> Group::silent_in(const Task& task) const {
    std::vector<std::int32_t> silent = awaited(task);
    std::erase_if(silent, [&](std::int32_t rank) {
        return !links_[static_cast<std::size_t>(rank)].lost.empty();
    });
    const auto* operation = dynamic_cast<const Operation*>(&task);
    if (operation == nullptr) return silent;
    // A rank that has sent its part takes this rank's late because it waits for another.
    std::vector<std::int32_t> senders = silent;
    std::erase_if(senders, [&](std::int32_t rank) {
        return !operation->open(operation->request_.program->receives_from(rank));
    });
    return senders.empty() ? silent : senders;
}

}  // namespace syncline
