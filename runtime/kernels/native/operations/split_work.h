// Splits an operation over threads by its tokens, and holds the scratch of operations. Used by the files of this folder.

#pragma once

#include <algorithm>
#include <cstdint>

#include "threads/scratch.h"
#include "threads/thread_pool.h"

namespace moec {

constexpr double kFlopsPerThread = 5e5;  // waking a thread takes several microseconds
constexpr int64_t kPartsPerThread = 4;  // so that other threads can take work from a slow one

// All operations of the calling thread share it, so an operation that calls another one must not keep values in it.
inline thread_local Scratch operation_scratch;

// Returns the number of threads for an operation: one, and one more per kFlopsPerThread of work.
inline int threads_for(double flops) {
    const int available = thread_count();
    const double useful = 1 + flops / kFlopsPerThread;
    return useful < available ? static_cast<int>(useful) : available;
}

// body(first, last, worker) over parts of the tokens.
template <class Body>
void split_tokens(int64_t tokens, int threads, const Body& body) {
    const int64_t parts = threads == 1 ? 1 : std::min<int64_t>(tokens, threads * kPartsPerThread);
    parallel_for(parts, threads, [&](int64_t part, int worker) {
        body(part * tokens / parts, (part + 1) * tokens / parts, worker);
    });
}

}  // namespace moec
