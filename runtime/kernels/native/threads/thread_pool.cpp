// Each worker watches for a new job for kWatch, then waits on a condition variable. One job runs at a time: a second caller
// runs its job alone instead of waiting. When the caller runs out of items, it releases the workers that have not begun. So a
// busy processor delays no caller.
//
// After fork() a child has none of the threads, and may inherit a lock that no thread will release. It forgets the pool (a leak
// of a few hundred bytes) and starts its own on first use. The pool is never destroyed; sleeping threads end with the process.

#include "threads/thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace moec {
namespace {

constexpr std::chrono::microseconds kWatch{100};

inline void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__) && !defined(_MSC_VER)
    __asm__ volatile("yield");
#endif
}

// Returns whether `holds` becomes true within kWatch.
template <class Condition>
bool watch(const Condition& holds) {
    const auto end = std::chrono::steady_clock::now() + kWatch;
    do {
        for (int i = 0; i < 16; ++i) {
            if (holds()) {
                return true;
            }
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Items of one part of a job, taken from both ends. The upper half of `bounds` is the first item, the lower half the end.
struct alignas(64) Range {
    std::atomic<uint64_t> bounds;

    void set(uint64_t first, uint64_t end) { bounds.store(first << 32 | end, std::memory_order_relaxed); }

    // Takes the first remaining item, or the last. Returns -1 if none remains.
    int64_t take(bool is_first) {
        uint64_t found = bounds.load(std::memory_order_relaxed);
        for (;;) {
            const uint64_t first = found >> 32, end = found & 0xFFFFFFFFu;
            if (first >= end) {
                return -1;
            }
            const uint64_t left = is_first ? (first + 1) << 32 | end : first << 32 | (end - 1);
            if (bounds.compare_exchange_weak(found, left, std::memory_order_relaxed)) {
                return static_cast<int64_t>(is_first ? first : end - 1);
            }
        }
    }
};

constexpr int kMostRanges = 64;  // more workers than that have no range of their own
constexpr int64_t kMostItems = int64_t{1} << 31;

// Each worker has a range of its own, so that it reads consecutive memory. Then it takes items from the ends of other ranges.
struct Job {
    Job(ParallelBody run, const void* about, int64_t items, int threads)
        : body(run), context(about), range_count(threads < kMostRanges ? threads : kMostRanges) {
        for (int i = 0; i < range_count; ++i) {
            ranges[i].set(static_cast<uint64_t>(items * i / range_count), static_cast<uint64_t>(items * (i + 1) / range_count));
        }
    }

    ParallelBody body;
    const void* context;
    int range_count;
    std::atomic<int> pending{0};  // workers that have not finished; changed under Pool::done_mutex
    Range ranges[kMostRanges];

    void work(int worker) {
        for (int i = 0; i < range_count; ++i) {
            Range& range = ranges[(worker + i) % range_count];
            const bool is_own = i == 0 && worker < range_count;
            for (int64_t item = range.take(is_own); item >= 0; item = range.take(is_own)) {
                body(context, item, worker);
            }
        }
    }
};

class Pool {
  public:
    explicit Pool(int threads) { resize(threads); }

    // Ends all workers and starts threads - 1 new ones. Throws std::system_error if the system refuses one; then fewer run.
    void resize(int threads) {
        std::lock_guard<std::mutex> exclusive(job_mutex_);
        for (auto& worker : workers_) {
            {
                std::lock_guard<std::mutex> lock(worker->mutex);
                worker->is_ending = true;
            }
            worker->wake.notify_one();
            worker->thread.join();
        }
        workers_.clear();
        for (int i = 1; i < threads; ++i) {
            auto worker = std::make_unique<Worker>();
            Worker* self = worker.get();
            workers_.reserve(workers_.size() + 1);
            worker->thread = std::thread([this, self, i] { serve(*self, i); });
            workers_.push_back(std::move(worker));
        }
    }

    // Returns false, with nothing done, if another job is running.
    bool run(Job& job, int threads) {
        std::unique_lock<std::mutex> exclusive(job_mutex_, std::try_to_lock);
        if (!exclusive.owns_lock()) {
            return false;
        }
        const int helpers = threads - 1 < static_cast<int>(workers_.size()) ? threads - 1 : static_cast<int>(workers_.size());
        job.pending.store(helpers, std::memory_order_relaxed);
        for (int i = 0; i < helpers; ++i) {
            Worker& worker = *workers_[static_cast<size_t>(i)];
            {
                std::lock_guard<std::mutex> lock(worker.mutex);
                worker.posted.store(&job, std::memory_order_release);
            }
            worker.wake.notify_one();
        }
        job.work(0);
        for (int i = 0; i < helpers; ++i) {
            Job* mine = &job;
            if (workers_[static_cast<size_t>(i)]->posted.compare_exchange_strong(mine, nullptr)) {
                std::lock_guard<std::mutex> lock(done_mutex_);
                job.pending.fetch_sub(1);
            }
        }
        const auto is_done = [&job] { return job.pending.load(std::memory_order_acquire) == 0; };
        if (!watch(is_done)) {
            std::unique_lock<std::mutex> lock(done_mutex_);
            done_.wait(lock, is_done);
        }
        return true;
    }

  private:
    struct Worker {
        std::thread thread;
        std::mutex mutex;
        std::condition_variable wake;
        std::atomic<Job*> posted{nullptr};
        bool is_ending = false;
    };

    void serve(Worker& self, int index) {
        const auto is_posted = [&self] { return self.posted.load(std::memory_order_acquire) != nullptr; };
        for (;;) {
            if (!watch(is_posted)) {
                std::unique_lock<std::mutex> lock(self.mutex);
                self.wake.wait(lock, [&] { return self.is_ending || is_posted(); });
                if (self.is_ending) {
                    return;
                }
            }
            Job* job = self.posted.exchange(nullptr);
            if (job == nullptr) {
                continue;  // the caller took the job back
            }
            job->work(index);
            std::lock_guard<std::mutex> lock(done_mutex_);
            if (job->pending.fetch_sub(1) == 1) {  // the caller may return from here on: `job` is gone
                done_.notify_one();
            }
        }
    }

    std::mutex job_mutex_;  // held while a job runs
    std::vector<std::unique_ptr<Worker>> workers_;
    std::mutex done_mutex_;
    std::condition_variable done_;
};

std::atomic<int> wanted_threads{1};
std::atomic<Pool*> the_pool{nullptr};

void forget_pool() {
    the_pool.store(nullptr);
}

// The pool, made on first use. Null if the system gives no threads.
Pool* pool() {
    Pool* found = the_pool.load(std::memory_order_acquire);
    if (found != nullptr) {
        return found;
    }
#if !defined(_WIN32)
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    if (registered != 0) {
        return nullptr;
    }
#endif
    try {
        auto made = std::make_unique<Pool>(1);
        if (the_pool.compare_exchange_strong(found, made.get())) {
            found = made.release();
            found->resize(wanted_threads.load());
        }
    } catch (const std::system_error&) {
        return found;
    } catch (const std::bad_alloc&) {
        return found;
    }
    return found;
}

}  // namespace

void set_thread_count(int count) {
    wanted_threads.store(count);
    Pool* existing = the_pool.load(std::memory_order_acquire);
    if (existing != nullptr) {
        existing->resize(count);
    }
}

int thread_count() {
    return wanted_threads.load(std::memory_order_relaxed);
}

void run_parallel(int64_t items, int threads, ParallelBody body, const void* context) {
    if (threads > 1 && items > 1 && items <= kMostItems) {
        Job job(body, context, items, threads);
        Pool* shared = pool();
        if (shared != nullptr && shared->run(job, threads)) {
            return;
        }
    }
    for (int64_t item = 0; item < items; ++item) {
        body(context, item, 0);
    }
}

}  // namespace moec
