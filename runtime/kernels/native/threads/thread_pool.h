// A few persistent threads that sleep between calls.

#pragma once

#include <cstdint>

namespace moec {

// Threads that a call may use, the caller's included; 1 until set. Starts or joins threads: waits for the call in progress.
void set_thread_count(int count);
int thread_count();

// body(context, item, worker) for each item in [0, items), on at most `threads` threads (worker < threads). Returns when all
// are done. A thread takes items in a row, and then what others have left: which runs which is not fixed, and results must not
// depend on it.
using ParallelBody = void (*)(const void* context, int64_t item, int worker);
void run_parallel(int64_t items, int threads, ParallelBody body, const void* context);

// The same for a callable (int64_t item, int worker).
template <class Body>
void parallel_for(int64_t items, int threads, const Body& body) {
    run_parallel(
        items, threads, [](const void* context, int64_t item, int worker) { (*static_cast<const Body*>(context))(item, worker); },
        &body);
}

}  // namespace moec
