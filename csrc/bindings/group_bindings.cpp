// Python bindings of groups: addresses of memory as integers, programs as rows.
#include "group_bindings.hpp"

#include <fcntl.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "group.hpp"
#include "interfaces.hpp"
#include "program.hpp"
#include "shared_link.hpp"
#include "tcp_link.hpp"
#include "ucx_link.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

namespace {

using syncline::BellSleeper;
using syncline::Clock;
using syncline::Doorbell;
using syncline::EventSleeper;
using syncline::Group;
using syncline::Handle;
using syncline::Link;
using syncline::Message;
using syncline::MessageHandle;
using syncline::Operation;
using syncline::Program;
using syncline::SegmentLayout;
using syncline::SharedLink;
using syncline::SharedMemory;
using syncline::Sleeper;
using syncline::Slots;
using syncline::Task;
using syncline::TcpLink;
using syncline::TcpTransport;
using syncline::Transport;
using syncline::UcxLink;
using syncline::UcxWorker;

using Rows = nb::ndarray<const std::int32_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Program> make_program(std::int32_t rank, std::int32_t ranks, std::int32_t blocks,
                                      const Rows& rows) {
    std::vector<syncline::Step> steps;
    steps.reserve(rows.shape(0));
    for (std::size_t i = 0; i < rows.shape(0); ++i) {
        const std::int32_t action = rows(i, 1);
        if (action < 0 || action > 2) throw std::invalid_argument("no such action");
        steps.push_back({rows(i, 0), static_cast<syncline::Action>(action), rows(i, 2), rows(i, 3),
                         rows(i, 4)});
    }
    return std::make_shared<Program>(rank, ranks, blocks, steps);
}

constexpr double longest_s = 1e9;  // a longer time would not fit into a time point

Clock::time_point after(double timeout_s) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(std::min(timeout_s, longest_s)));
}

std::chrono::nanoseconds nanoseconds(double duration_s) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(duration_s));
}

const std::byte* memory(std::uintptr_t address) {
    return reinterpret_cast<const std::byte*>(address);
}

std::byte* writable(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

// Another rank of this host, or this one: its segment of shared memory, and its eventfd or -1.
using Neighbour = std::tuple<std::int32_t, int, int>;
// A rank of another host, and the address of its worker of UCX.
using Remote = std::tuple<std::int32_t, nb::bytes>;
// A rank of another host, and a socket that is connected to it.
using Connection = std::tuple<std::int32_t, int>;

// Fragments in flight to each rank that UCX joins.
constexpr std::uint32_t ucx_window = 8;

// A layout for collectives, followed by the same layout for messages between two ranks.
std::size_t segment_bytes(const SegmentLayout& layout) { return 2 * layout.bytes(); }

// A group of ranks that share memory, or are joined by TCP or UCX, or both. Segments live as long
// as it does.
class NativeGroup {
  public:
    // `neighbours` are this rank and all others of the host, in order; all other ranks are in
    // `connections`, whose sockets the group copies, or with a worker in `remotes`.
    NativeGroup(std::int32_t rank, const std::vector<Neighbour>& neighbours,
                const std::vector<Connection>& connections, const std::vector<Remote>& remotes,
                std::shared_ptr<UcxWorker> worker, std::size_t fragment_bytes, std::uint32_t window,
                std::size_t remote_fragment_bytes, double pause_s, double spin_s, double timeout_s)
        : layout_{static_cast<std::int32_t>(neighbours.size()), fragment_bytes, window} {
        std::vector<std::unique_ptr<Link>> links(neighbours.size() + connections.size() +
                                                 remotes.size());
        std::shared_ptr<Transport> transport = worker;
        if (!connections.empty()) {
            const auto tcp = std::make_shared<TcpTransport>();
            for (const auto& [peer, connected] : connections) {
                const int socket = fcntl(connected, F_DUPFD_CLOEXEC, 0);
                if (socket < 0) {
                    throw std::system_error(errno, std::generic_category(), "a TCP connection");
                }
                links.at(static_cast<std::size_t>(peer)) =
                    std::make_unique<TcpLink>(tcp, socket, peer, remote_fragment_bytes);
            }
            transport = tcp;
        }
        std::vector<std::shared_ptr<SharedMemory>> segments;
        std::int32_t own_place = 0;
        int own_event = -1;
        for (const auto& [peer, segment, event] : neighbours) {
            if (peer == rank) {
                own_place = static_cast<std::int32_t>(segments.size());
                own_event = event;
            }
            try {
                segments.push_back(std::make_shared<SharedMemory>(segment, segment_bytes(layout_)));
            } catch (const std::length_error& error) {
                throw syncline::faulty(
                    peer, std::to_string(segment_bytes(layout_)) + " bytes of shared memory",
                    error.what());
            }
        }
        own_ = segments.at(static_cast<std::size_t>(own_place));
        const auto slots = std::make_shared<Slots>(layout_.slots());
        const auto message_slots = std::make_shared<Slots>(layout_.slots());
        for (std::size_t place = 0; place < neighbours.size(); ++place) {
            const auto& [peer, segment, event] = neighbours[place];
            if (peer == rank) continue;
            const auto join = [&](const std::shared_ptr<Slots>& own_slots, std::size_t start) {
                return std::make_unique<SharedLink>(layout_, own_, segments[place], own_place,
                                                    static_cast<std::int32_t>(place), own_slots,
                                                    peer, event, start);
            };
            auto link = join(slots, 0);
            link->carry_messages(join(message_slots, layout_.bytes()));
            links.at(static_cast<std::size_t>(peer)) = std::move(link);
        }
        std::vector<std::pair<std::int32_t, UcxLink*>> far;
        for (const auto& [peer, address] : remotes) {
            try {
                auto link =
                    std::make_unique<UcxLink>(worker, std::string(address.c_str(), address.size()),
                                              rank, peer, remote_fragment_bytes, ucx_window);
                far.emplace_back(peer, link.get());
                links.at(static_cast<std::size_t>(peer)) = std::move(link);
            } catch (const std::runtime_error& error) {  // there is no way to that address
                throw syncline::PeerFailure(peer, syncline::Fault::lost, error.what());
            }
        }
        if (worker != nullptr) connect(far, *worker, after(timeout_s));
        transport_ = transport;
        Doorbell& bell = SharedLink::bell_of(*own_);
        std::unique_ptr<Sleeper> sleeper;
        if (transport != nullptr) {
            sleeper = std::make_unique<EventSleeper>(transport, &bell, own_event);
        } else {
            sleeper = std::make_unique<BellSleeper>(bell);
        }
        group_ = std::make_unique<Group>(
            rank, std::move(links), std::move(sleeper), std::move(transport),
            Group::Patience{nanoseconds(pause_s), nanoseconds(spin_s)});
    }

    // A fork leaks what UCX and the operating system keep: closing it would close the parent's.
    ~NativeGroup() {
        if (group_->forked()) (void)group_.release();
    }
    NativeGroup(const NativeGroup&) = delete;
    NativeGroup& operator=(const NativeGroup&) = delete;

    [[nodiscard]] Group& group() { return *group_; }
    void wait(const std::shared_ptr<Task>& task, double timeout_s, bool gives_up) {
        group_->wait(task, after(timeout_s), gives_up);
    }
    [[nodiscard]] bool forked() const { return group_->forked(); }
    MessageHandle send(std::uintptr_t source, std::uint64_t count, std::uint8_t dtype,
                       std::int32_t peer, std::uint32_t tag, std::uint8_t kind) {
        auto message =
            std::make_shared<Message>(call(count, dtype, tag, kind), peer, memory(source), nullptr);
        group_->send(message);
        return message;
    }
    // `peer` is -1 for whoever sends first.
    MessageHandle receive(std::uintptr_t target, std::uint64_t count, std::uint8_t dtype,
                          std::int32_t peer, std::uint32_t tag, std::uint8_t kind) {
        auto message = std::make_shared<Message>(call(count, dtype, tag, kind), peer, nullptr,
                                                 writable(target));
        group_->receive(message);
        return message;
    }
    void lose(std::int32_t rank, const std::string& what) { group_->lose(rank, what); }
    bool failed() { return group_->failed(); }
    std::vector<std::int32_t> cut_off() { return group_->cut_off(); }
    void close() {
        if (group_->forked()) return;
        group_->close();
        if (transport_ != nullptr) transport_->close();  // the group may be kept for long
    }

  private:
    static syncline::Call call(std::uint64_t count, std::uint8_t dtype, std::uint32_t tag,
                               std::uint8_t kind) {
        return {count, tag, 0, kind, static_cast<syncline::Dtype>(dtype), syncline::Reduction::sum,
                0};
    }

    // Return once all are connected. Throws PeerFailure.
    static void connect(const std::vector<std::pair<std::int32_t, UcxLink*>>& far,
                        UcxWorker& worker, Clock::time_point deadline) {
        const syncline::Unlocked unlocked;
        constexpr std::chrono::milliseconds look{10};
        for (const auto& [peer, link] : far) {
            while (!link->connected()) {
                if (!link->broken().empty()) {
                    throw syncline::PeerFailure(peer, syncline::Fault::lost, link->broken());
                }
                if (Clock::now() > deadline) {
                    throw syncline::PeerFailure(
                        peer, syncline::Fault::lost,
                        "rank " + std::to_string(peer) + " did not connect through UCX in time");
                }
                if (worker.progress()) continue;
                worker.sleep(look);
                const nb::gil_scoped_acquire held;
                if (PyErr_CheckSignals() != 0) throw nb::python_error();  // such as Ctrl-C
            }
        }
    }

    SegmentLayout layout_;
    std::shared_ptr<SharedMemory> own_;
    std::shared_ptr<Transport> transport_;
    std::unique_ptr<Group> group_;
};

// A collective of a group on vectors of one kind, which may be called again and again.
class NativeCall {
  public:
    NativeCall(std::shared_ptr<NativeGroup> group, std::shared_ptr<Program> program,
               std::uint64_t count, std::uint32_t variant, std::uint8_t collective,
               std::uint8_t dtype, std::uint8_t reduction, std::size_t result_start,
               std::size_t result_stop)
        : group_(std::move(group)),
          request_{std::move(program),
                   {count, 0, variant, collective, static_cast<syncline::Dtype>(dtype),
                    static_cast<syncline::Reduction>(reduction), 0},
                   nullptr,
                   nullptr,
                   result_start,
                   result_stop,
                   nullptr} {}

    // Returns null if it is done. `output` is 0 where the result stays in `work`.
    Handle start(std::uintptr_t input, std::uintptr_t work, std::uintptr_t output, bool blocking) {
        Operation::Request request = request_;
        request.input = memory(input);
        request.work = writable(work);
        request.output = output == 0 ? nullptr : writable(output);
        Handle handle = group_->group().start(std::move(request), blocking);
        return handle->done() ? nullptr : std::move(handle);
    }

  private:
    std::shared_ptr<NativeGroup> group_;
    Operation::Request request_;
};

// As ctypes.memmove, which takes half a microsecond to be called.
void move(std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
    constexpr std::size_t long_enough = 64 * 1024;  // to release the interpreter's lock
    std::optional<syncline::Unlocked> unlocked;
    if (bytes > long_enough) unlocked.emplace();
    std::memmove(writable(to), memory(from), bytes);
}

}  // namespace

void bind_groups(nb::module_& module) {
    // Programs are cached, and groups may live, until the process ends.
    nb::set_leak_warnings(false);
    nb::exception<syncline::Timeout>(module, "WaitTimeout", PyExc_RuntimeError);
    nb::exception<syncline::Forked>(module, "Forked", PyExc_RuntimeError);
    static PyObject* failure =
        PyErr_NewException("syncline._native.LinkFailure", PyExc_RuntimeError, nullptr);
    module.attr("LinkFailure") = nb::borrow(failure);
    nb::register_exception_translator(
        [](const std::exception_ptr& thrown, void*) {
            try {
                std::rethrow_exception(thrown);
            } catch (const syncline::PeerFailure& error) {
                const nb::tuple arguments = nb::make_tuple(
                    error.what(), error.rank, error.fault == syncline::Fault::disagrees);
                PyErr_SetObject(failure, arguments.ptr());
            } catch (const std::system_error& error) {
                const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what());
                PyErr_SetObject(PyExc_OSError, arguments.ptr());
            }
        },
        nullptr);

    module.def("interfaces", [] {
        std::vector<std::tuple<std::string, std::string, int>> found;
        for (const syncline::Interface& each : syncline::interfaces()) {
            found.emplace_back(each.name, each.address, each.prefix_bits);
        }
        return found;
    });
    nb::class_<Program>(module, "Program")
        .def_prop_ro("out_of_place", &Program::out_of_place)
        .def("changes", &Program::changes);
    module.def("make_program", &make_program);
    module.def("move", &move);
    nb::class_<Task>(module, "Task").def_prop_ro("done", &Task::done);
    nb::class_<Operation, Task>(module, "Operation");
    nb::class_<Message, Task>(module, "Message").def_prop_ro("peer", &Message::peer);
    nb::class_<UcxWorker>(module, "UcxWorker")
        .def(nb::new_([](const std::string& library, const UcxWorker::Settings& settings) {
            return std::make_shared<UcxWorker>(syncline::UcxLibrary::load(library), settings);
        }))
        .def_prop_ro("address", [](const UcxWorker& worker) {
            const std::string address = worker.address();
            return nb::bytes(address.data(), address.size());
        });
    nb::class_<NativeGroup>(module, "NativeGroup")
        .def(nb::init<std::int32_t, const std::vector<Neighbour>&, const std::vector<Connection>&,
                      const std::vector<Remote>&, std::shared_ptr<UcxWorker>, std::size_t,
                      std::uint32_t, std::size_t, double, double, double>(),
             nb::arg("rank"), nb::arg("neighbours"), nb::arg("connections"), nb::arg("remotes"),
             nb::arg("worker").none(), nb::arg("fragment_bytes"), nb::arg("window"),
             nb::arg("remote_fragment_bytes"), nb::arg("pause_s"), nb::arg("spin_s"),
             nb::arg("timeout_s"))
        .def("wait", &NativeGroup::wait, nb::call_guard<syncline::Unlocked>())
        .def_prop_ro("forked", &NativeGroup::forked)
        .def("send", &NativeGroup::send, nb::call_guard<syncline::Unlocked>())
        .def("receive", &NativeGroup::receive, nb::call_guard<syncline::Unlocked>())
        .def("lose", &NativeGroup::lose, nb::call_guard<syncline::Unlocked>())
        .def("failed", &NativeGroup::failed, nb::call_guard<syncline::Unlocked>())
        .def("cut_off", &NativeGroup::cut_off, nb::call_guard<syncline::Unlocked>())
        .def("close", &NativeGroup::close, nb::call_guard<syncline::Unlocked>());
    nb::class_<NativeCall>(module, "NativeCall")
        .def(nb::init<std::shared_ptr<NativeGroup>, std::shared_ptr<Program>, std::uint64_t,
                      std::uint32_t, std::uint8_t, std::uint8_t, std::uint8_t, std::size_t,
                      std::size_t>(),
             nb::arg("group"), nb::arg("program"), nb::arg("count"), nb::arg("variant"),
             nb::arg("collective"), nb::arg("dtype"), nb::arg("reduction"), nb::arg("result_start"),
             nb::arg("result_stop"))
        .def("start", &NativeCall::start, nb::call_guard<syncline::Unlocked>());
    module.def("segment_bytes",
               [](std::int32_t peers, std::size_t fragment_bytes, std::uint32_t window) {
                   return segment_bytes(SegmentLayout{peers, fragment_bytes, window});
               });
}
