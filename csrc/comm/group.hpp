// The ranks of a group, as one of them runs collectives with the others.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "link.hpp"
#include "mailbox.hpp"
#include "origin.hpp"
#include "program.hpp"
#include "sleeper.hpp"
#include "task.hpp"

namespace syncline {

// One collective in flight.
class Operation final : public Task {
  public:
    // What to run on which memory. If `input` is another buffer than `work`, it is not changed; the
    // program must then be out_of_place().
    struct Request {
        std::shared_ptr<const Program> program;
        Call call;
        const std::byte* input;
        std::byte* work;
        // Elements [result_start, result_stop) are divided by the number of ranks at the end, where
        // the reduction is the average.
        std::size_t result_start;
        std::size_t result_stop;
        // Where that part goes; null: it stays.
        std::byte* output;
    };

    [[nodiscard]] const Call& call() const override { return request_.call; }

  private:
    friend class Group;

    void begin_with(Request request);
    // In bytes.
    [[nodiscard]] std::size_t offset(std::int32_t block) const;
    [[nodiscard]] std::size_t begin(const Transfer& transfer) const;
    [[nodiscard]] std::size_t end(const Transfer& transfer) const;
    // Whether earlier transfers are done with all bytes of [from, to) that they touch.
    [[nodiscard]] bool passed(const std::vector<std::uint32_t>& earlier, std::size_t from,
                              std::size_t to) const;
    // Whether one of the transfers is not done.
    [[nodiscard]] bool open(const std::vector<std::uint32_t>& transfers) const;
    [[nodiscard]] bool in_place() const { return request_.input == request_.work; }
    // Whether receives write all of the part that goes to `output`, and no transfer covers it in
    // part.
    [[nodiscard]] bool writes_output_whole() const;
    // Where the bytes from `from` on are written, up to the end of their transfer.
    [[nodiscard]] std::byte* place(std::size_t from) const;
    void finish();

    Request request_{};
    std::size_t element_ = 0;
    std::size_t block_elements_ = 0;  // of every block, without the remainder
    std::size_t rest_elements_ = 0;
    bool direct_ = false;  // whether transfers write to `output`; otherwise it is copied there
    std::vector<std::size_t> through_;  // of each transfer: bytes sent and released, or landed
    std::size_t left_ = 0;              // transfers that are not done
};

using Handle = std::shared_ptr<Operation>;

// Some peers did not answer in time.
class Timeout : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Runs collectives in the order in which they are started, which must be the same on all ranks.
// A waiting thread drives them; without one, a thread of the group does. Safe to use from several
// threads. A fork of the process has the memory of the group but none of its threads, and shares
// its kernel objects: it changes nothing, and its calls are refused. It must leak the group instead
// of destroying it.
class Group {
  public:
    // How a waiting thread polls.
    struct Patience {
        std::chrono::nanoseconds pause;  // busy-poll this long, without yielding
        std::chrono::nanoseconds spin;   // poll this long in all before blocking
    };

    // links[r] joins this rank to rank r; that of this rank is null. `transport` is null if links
    // need no progress.
    Group(std::int32_t rank, std::vector<std::unique_ptr<Link>> links,
          std::unique_ptr<Sleeper> sleeper, std::shared_ptr<Transport> transport,
          Patience patience);
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ~Group();

    [[nodiscard]] std::int32_t rank() const { return rank_; }
    [[nodiscard]] std::int32_t ranks() const { return static_cast<std::int32_t>(links_.size()); }

    // Begin a collective. `blocking`: the caller will wait for it at once, so no other thread is
    // woken, and this one works on it until it is done or would block. Throws an earlier failure of
    // the group, or Forked; wait() throws a failure of this collective.
    Handle start(Operation::Request request, bool blocking);

    // Return once it is done. Throws Forked, PeerFailure, after which the group is of no use, or
    // Timeout: the collective stays in flight, unless the rank gives up, which ends the group.
    void wait(const std::shared_ptr<Task>& task, Clock::time_point deadline, bool gives_up = true);

    // Begin to send or to receive a message. Throws an earlier failure of the group, or Forked.
    void send(const MessageHandle& message) { post(message, &Mailbox::send); }
    void receive(const MessageHandle& message) { post(message, &Mailbox::receive); }

    // A peer has died or left: what it has sent is still received, the rest never comes.
    void lose(std::int32_t rank, const std::string& what);

    // End all waits; collectives in flight are abandoned, and their memory is not accessed any
    // more. No thread is in the sleeper any more.
    void close();

    // Whether this is a fork of the process that made the group.
    [[nodiscard]] bool forked() const { return origin_.forked(); }
    // Whether nothing is in flight.
    [[nodiscard]] bool idle();
    // Whether collectives in flight will never be done.
    [[nodiscard]] bool failed();
    // The ranks of other hosts that have ended, or cannot be reached, as far as is known now.
    [[nodiscard]] std::vector<std::int32_t> cut_off();

  private:
    struct Cursor {
        Handle operation;
        std::size_t index;   // in the program's list for the peer
        std::size_t offset;  // bytes of that transfer
    };
    struct Piece {
        Operation* operation;
        std::uint32_t transfer;
        std::size_t bytes;
    };
    struct Side {
        std::deque<Cursor> waiting;
        std::deque<Piece> under_way;
        std::uint64_t retired = 0;
    };
    struct Peer {
        std::unique_ptr<Link> link;
        Side sends;
        Side receives;
        std::string lost;                // why, once it is
        std::optional<Verdict> verdict;  // of its own, if it is lost because it has given up
    };

    // All of these need the lock.
    bool progress();
    // Once the group has failed: let links write why. Returns whether anything moved.
    bool flush();
    [[nodiscard]] bool flushes() const;
    bool progress_sends(Peer& peer);
    bool progress_receives(Peer& peer);
    bool retire(Side& side, std::uint64_t count);
    void complete(const Piece& piece);
    void require_peers();
    // Throws PeerFailure if the operations miss a peer that is lost.
    void find_missing();
    // Whether a peer has given up because it waits in vain, and blames this rank, or several.
    [[nodiscard]] bool names_no_other(const Peer& peer) const;
    [[nodiscard]] PeerFailure loss(std::int32_t rank, const Call& call) const;
    // Throws PeerFailure if the peer's verdict is impossible.
    void poll_verdict(std::int32_t rank);
    // Whether the operation needs more from, or must send more to, the rank.
    [[nodiscard]] bool misses(const Operation& operation, std::int32_t rank) const;
    // Whether the operation waits for the rank now.
    [[nodiscard]] bool awaits(const Operation& operation, std::int32_t rank) const;
    void fail(std::int32_t rank, Fault fault, std::string what);
    // Fail because of the ranks that a task waits for.
    void give_up_on(const Task& task);
    // After a failure because of silent ranks: a live rank answers a notice that blames it by
    // naming the rank that it waits for itself. Name the rank that does not answer.
    void name_silent(std::vector<std::int32_t> silent);
    // Fail for the exception that is being handled.
    void fail_for_exception();
    void throw_failure() const;
    void post(const MessageHandle& message, void (Mailbox::*begin)(const MessageHandle&));
    [[nodiscard]] std::string waited_for(const Task& task) const;
    // The ranks that a task waits for now.
    [[nodiscard]] std::vector<std::int32_t> awaited(const Task& task) const;
    // Those of them that have not given up: if it waits to receive from some, only those.
    [[nodiscard]] std::vector<std::int32_t> silent_in(const Task& task) const;
    [[nodiscard]] bool all_done() const { return active_.empty() && mailbox_.idle(); }

    // How to poll, for the collectives in flight.
    [[nodiscard]] Patience patience() const;
    // Whether a peer has sent something that this rank has not received.
    [[nodiscard]] bool has_arrivals();
    // Drive all collectives until `until` is done, or all are (null). Returns false at the
    // deadline, or instead of blocking if there is none: then the caller will wait at once.
    bool drive(std::unique_lock<std::mutex>& lock, const Task* until,
               std::optional<Clock::time_point> deadline);
    bool drive_on(std::unique_lock<std::mutex>& lock, const Task* until,
                  std::optional<Clock::time_point> deadline);
    // Append a collective to those in flight.
    void enlist(const Handle& operation);
    void wake_progress_thread();
    void run_progress();

    struct Failure {
        Verdict verdict;
        std::string what;
    };

    Origin origin_;
    std::int32_t rank_;
    std::vector<Peer> links_;
    Mailbox mailbox_;
    std::unique_ptr<Sleeper> sleeper_;
    std::shared_ptr<Transport> transport_;
    Patience patience_;

    std::mutex mutex_;
    std::condition_variable done_;  // for those who wait while another thread drives
    std::condition_variable work_;  // for the group's own thread
    std::uint32_t sequence_ = 0;
    bool driven_ = false;
    bool any_lost_ = false;
    bool closing_ = false;
    std::vector<Handle> active_;
    Handle last_;  // that was started
    std::optional<Failure> failure_;
    Clock::time_point flush_until_{};
    std::thread progress_thread_;
};

}  // namespace syncline
