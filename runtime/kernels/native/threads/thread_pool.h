// A few persistent threads that sleep between calls. Start here: `parallel_for` is how all operations use several threads.

#pragma once

#include <cstdint>

namespace moec {

// Number of threads that a call may use, including the caller's; 1 until set. Setting it starts or joins threads and waits for
// the call in progress.
void set_thread_count(int count);
int thread_count();

// Calls body(context, item, worker) for each item in [0, items), on at most `threads` threads (worker < threads). Returns when
// all items are done. A thread takes consecutive items first, then remaining items of others. The assignment is not fixed, and
// results must not depend on it.
using ParallelBody = void (*)(const void* context, int64_t item, int worker);
void run_parallel(int64_t items, int threads, ParallelBody body, const void* context);

// The same for a callable (int64_t item, int worker).
template <class Body>
void parallel_for(int64_t items, int threads, const Body& body) {
    run_parallel(
        items, threads,
        [](const void* context, int64_t item, int worker) { (*static_cast<const Body*>(context))(item, worker); }, &body);
}

}  // namespace moec
