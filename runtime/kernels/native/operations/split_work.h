// Splits an operation over threads by its tokens or row blocks, and holds the scratch of operations. Used by the files of this
// folder.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "targets/kernel_table.h"
#include "threads/thread_pool.h"

namespace moec {

constexpr double kFlopsPerThread = 5e5;  // waking a thread takes several microseconds
constexpr double kFlopsPerExp = 30;
constexpr int64_t kPartsPerThread = 4;  // so that other threads can take work from a slow one
constexpr double kFlopsPerPart = 4e6;   // largest part of a long product, about 10 us
constexpr int64_t kBlocksPerUnit = 2;   // products over one token take two blocks at a time
constexpr int64_t kTokensAtOnce = 96;   // tokens whose rounded and hidden values are kept at once

// Memory that is kept from call to call and only grows.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }

    // Returns at least `count` uninitialized floats, or null.
    float* take(int64_t count) {
        if (count > capacity_) {
            if (static_cast<uint64_t>(count) > std::numeric_limits<size_t>::max() / sizeof(float)) {
                return nullptr;
            }
            std::free(data_);
            data_ = static_cast<float*>(std::malloc(static_cast<size_t>(count) * sizeof(float)));
            capacity_ = data_ != nullptr ? count : 0;
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    int64_t capacity_ = 0;
};

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

// body(begin, end) over parts of the row blocks of a matrix.
template <class Body>
void split_blocks(int64_t blocks, double flops, const Body& body) {
    const int threads = threads_for(flops);
    const int64_t units = (blocks + kBlocksPerUnit - 1) / kBlocksPerUnit;
    const int64_t wanted = std::max(threads * kPartsPerThread, static_cast<int64_t>(flops / kFlopsPerPart));
    const int64_t parts = threads == 1 ? 1 : std::min(units, wanted);
    parallel_for(parts, threads, [&](int64_t part, int) {
        const int64_t begin = part * units / parts * kBlocksPerUnit;
        const int64_t end = std::min(blocks, (part + 1) * units / parts * kBlocksPerUnit);
        body(begin, end);
    });
}

inline double product_flops(const MatrixView& matrix, int64_t tokens) {
    return 2.0 * static_cast<double>(matrix.rows) * static_cast<double>(matrix.columns) * static_cast<double>(tokens);
}

}  // namespace moec
