// Lets other threads of Python run while this one is in native code.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace syncline {

// As nanobind's gil_scoped_release, but for threads that return once the interpreter is ending.
// Until 3.13, Python ends such a thread by pthread_exit, whose unwinding aborts the process as soon
// as it meets a frame that is noexcept, as nanobind's are. Here the thread stays until the process
// has ended, as it does from Python 3.14 on.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // the unwinding of pthread_exit; no function of Python throws
            for (;;) pause();
        }
    }

  private:
    PyThreadState* state_;
};

}  // namespace syncline
