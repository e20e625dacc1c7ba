// Reader threads of the expert cache, and the memory that they read into. On the default path an evicted expert gives up its
// memory in `left`, and `give_places` hands that memory to the next expert of the same size. Callers: expert_cache.cpp.

#include <algorithm>
#include <chrono>

#include "experts/expert_cache.h"
#include "experts/mapped_faults.h"

#if defined(__unix__) || defined(__APPLE__)
#define MOEC_HAS_PREADV 1
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace moec {
namespace {

// Age from which an identity is trusted. A younger file may change again without a new time stamp.
constexpr std::chrono::seconds kSettled{2};

// Read a byte of each page, so that all are in memory.
void touch(const uint8_t* start, int64_t size_bytes) {
    constexpr int64_t kPageBytes = 4096;
    volatile uint8_t sum = 0;
    for (int64_t at = 0; at < size_bytes; at += kPageBytes) {
        sum = static_cast<uint8_t>(sum + start[at]);
    }
}

bool is_settled(const FileIdentity& identity) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const int64_t now_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    return identity.size_bytes >= 0 && now_ns - identity.changed_ns > std::chrono::nanoseconds(kSettled).count();
}

}  // namespace

// An expert was evicted or its read failed. Its place becomes free for the next expert of its size. Mapped pages are dropped
// later, without the lock.
void ExpertCache::left(int64_t index) {
    if (!mapped_.empty()) {
        dropped_.push_back(index);
    } else if (addresses_[static_cast<size_t>(index)] != nullptr) {
        spare_[size(index)].push_back(index);
    }
}

void ExpertCache::serve(const Load& load, const Check& check, Takes takes) {
    for (;;) {
        bool is_warm = false, has_places = false, is_known = false;
        Indices run;
        SourceFile before{};
        FileIdentity after;
        std::vector<uint8_t*> addresses;
        Indices dropped;
        {
            Lock lock(mutex_);
            run = next_run(lock, is_warm, takes);
            if (run.empty()) {
                return;
            }
            warming_ += is_warm;
            change_reading(1);
            has_places = give_places(run);
            before = file_of(run);
            is_known = is_verified(run, before.state);
            dropped = take_dropped();
            for (const int64_t index : run) {
                addresses.push_back(addresses_[static_cast<size_t>(index)]);
            }
        }
        for (const int64_t index : dropped) {
            drop_pages(index);
        }
        Indices failed;
        if (!has_places || !read(run, addresses)) {
            failed = load(run);
            after = before.identity;  // Python compared it; if the file changes, a later read notices
        } else if (check) {
            after = identity_of(before.descriptor);
            if (!is_known || !(after == before.identity)) {
                failed = check(run, addresses);
            }
        }
        const Lock lock(mutex_);
        if (check) {
            note_verified(run, failed, before, after);
        }
        change_reading(-1);
        warming_ -= is_warm;
        end(run, failed, is_warm);
        changed_.notify_all();
    }
}

bool ExpertCache::is_verified(const Indices& run, uint32_t state) const {
    return std::all_of(run.begin(), run.end(), [=](int64_t index) { return verified_[static_cast<size_t>(index)] == state; });
}

// Note a run that was read and compared, or that needed no comparison. before: its file when the read began.
void ExpertCache::note_verified(const Indices& run, const Indices& failed, const SourceFile& before,
                                const FileIdentity& after) {
    SourceFile& file = file_of(run);
    if (!(after == before.identity)) {
        if (!(after == file.identity)) {
            file.identity = after;
            ++file.state;
        }
        return;
    }
    if (is_verified(run, before.state) || !is_settled(after)) {
        return;
    }
    for (const int64_t index : run) {
        if (std::find(failed.begin(), failed.end(), index) == failed.end()) {
            verified_[static_cast<size_t>(index)] = before.state;
        }
    }
}

// Wait for the most urgent read. Returns an empty run once closed.
ExpertCache::Indices ExpertCache::next_run(Lock& lock, bool& is_warm, Takes takes) {
    while (!is_closed_) {
        Indices run = next_read(takes);
        if (!run.empty()) {
            return run;
        }
        if (takes == Takes::kAdvice) {
            advice_work_.wait(lock);
            continue;
        }
        bool had_warmup = !warmup_.empty();
        while (!warmup_.empty()) {  // an expert that does not fit now is skipped
            const int64_t index = warmup_.front();
            warmup_.pop_front();
            if (fits_free(index)) {
                begin_warm(index);
                is_warm = true;
                return {index};
            }
        }
        if (had_warmup) {
            changed_.notify_all();
        }
        work_.wait(lock);
    }
    return {};
}

// Give every expert of a run the free place of an evicted expert of its size. Returns false, with nothing changed, if one of
// them gets none.
bool ExpertCache::give_places(const Indices& run) {
    if (!mapped_.empty()) {
        return true;
    }
    if (moved_.size() >= addresses_.size()) {
        return false;  // Python must first learn of the earlier moves, so that their list stays bounded
    }
    for (const int64_t index : run) {
        const auto spare = spare_.find(size(index));
        const int64_t wanted = std::count_if(run.begin(), run.end(), [&](int64_t other) { return size(other) == size(index); });
        if (sources_[static_cast<size_t>(index)].view == nullptr || spare == spare_.end() ||
            static_cast<int64_t>(spare->second.size()) < wanted) {
            return false;
        }
    }
    for (const int64_t index : run) {
        Indices& spare = spare_[size(index)];
        const int64_t before = spare.back();
        spare.pop_back();
        if (before != index) {
            std::swap(addresses_[static_cast<size_t>(index)], addresses_[static_cast<size_t>(before)]);
            // If the expert's own place was free as well, the two experts swap their places: both still have one.
            moved_.emplace_back(before, index);
            const auto own = std::find(spare.begin(), spare.end(), index);
            if (own != spare.end()) {
                *own = before;
            }
        }
        rebind(index);
    }
    return true;
}

// Point the kernels' view of an expert to the place where it will be.
void ExpertCache::rebind(int64_t index) {
    const ExpertSource& source = sources_[static_cast<size_t>(index)];
    const uint8_t* const address = addresses_[static_cast<size_t>(index)];
    source.view->up.data = address + source.up_bytes;
    source.view->down.data = address + source.down_bytes;
    source.view->gate.data = address + (source.gate_bytes < 0 ? source.up_bytes : source.gate_bytes);
}

bool ExpertCache::read(const Indices& run, const std::vector<uint8_t*>& addresses) const {
    return mapped_.empty() ? read_into_places(run, addresses)
                           : std::all_of(run.begin(), run.end(), [this](int64_t index) { return read_pages(index); });
}

// Bring the mapped pages of an expert into memory. Returns false if one is missing: Python tells why.
bool ExpertCache::read_pages(int64_t index) const {
    const MappedPages& pages = mapped_[static_cast<size_t>(index)];
#if defined(MOEC_HAS_PREADV)
    const size_t size = static_cast<size_t>(pages.size_bytes);
    ::madvise(pages.start, size, MADV_WILLNEED);
#if defined(MADV_POPULATE_READ)
    if (::madvise(pages.start, size, MADV_POPULATE_READ) == 0) {  // Linux 5.14; page by page on older systems
        return !has_faulted(pages.watch);
    }
#endif
#endif
    touch(pages.start, pages.size_bytes);
    return !has_faulted(pages.watch);
}

// Take the mapped pages of an evicted expert out of memory and out of the page cache, unless it is being read again. If that
// begins meanwhile, the expert is only read twice.
void ExpertCache::drop_pages(int64_t index) {
    {
        const Lock lock(mutex_);
        if (columns_.state[index] != kAbsent && columns_.state[index] != kQueued) {
            return;
        }
    }
#if defined(MOEC_HAS_PREADV)
    const MappedPages& pages = mapped_[static_cast<size_t>(index)];
    ::madvise(pages.start, static_cast<size_t>(pages.size_bytes), MADV_DONTNEED);
#if defined(POSIX_FADV_DONTNEED)
    const ExpertSource& source = sources_[static_cast<size_t>(index)];
    ::posix_fadvise(source.descriptor, source.offset_bytes, source.size_bytes, POSIX_FADV_DONTNEED);
#endif
#endif
}

// Returns the evicted experts that are not being read again. Call it with the lock.
ExpertCache::Indices ExpertCache::take_dropped() {
    Indices experts;
    experts.swap(dropped_);
    experts.erase(std::remove_if(experts.begin(), experts.end(),
                                 [this](int64_t index) {
                                     return columns_.state[index] == kLoading || columns_.state[index] == kResident;
                                 }),
                  experts.end());
    return experts;
}

bool ExpertCache::read_into_places(const Indices& run, const std::vector<uint8_t*>& addresses) const {
#if defined(MOEC_HAS_PREADV)
    std::vector<iovec> parts;
    int64_t left_bytes = 0;
    for (size_t i = 0; i < run.size(); ++i) {
        const int64_t bytes = sources_[static_cast<size_t>(run[i])].size_bytes;
        parts.push_back({addresses[i], static_cast<size_t>(bytes)});
        left_bytes += bytes;
    }
    const ExpertSource& first = sources_[static_cast<size_t>(run[0])];
    int64_t offset = first.offset_bytes;
    size_t part = 0;
    while (left_bytes > 0) {
        const ssize_t count = ::preadv(first.descriptor, parts.data() + part, static_cast<int>(parts.size() - part), offset);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return false;
        }
        offset += count;
        left_bytes -= count;
        for (size_t rest = static_cast<size_t>(count); rest > 0;) {
            const size_t step = std::min(rest, parts[part].iov_len);
            parts[part].iov_base = static_cast<uint8_t*>(parts[part].iov_base) + step;
            parts[part].iov_len -= step;
            rest -= step;
            part += parts[part].iov_len == 0;
        }
    }
#if defined(POSIX_FADV_DONTNEED)
    if (drops_pages_) {
        ::posix_fadvise(first.descriptor, first.offset_bytes, offset - first.offset_bytes, POSIX_FADV_DONTNEED);
    }
#endif
    return true;
#else
    static_cast<void>(run);
    static_cast<void>(addresses);
    return false;
#endif
}

void ExpertCache::end(const Indices& run, const Indices& failed, bool is_warm) {
    for (const int64_t index : run) {
        if (std::find(failed.begin(), failed.end(), index) != failed.end()) {
            left(index);
            fail_read(index);
            has_failed_[static_cast<size_t>(index)] = columns_.is_leased[index];  // for the stream that waits for it
        } else if (is_warm) {
            arrive_warm(index);
            ++counts_->warm_reads;
        } else {
            arrive(index);
        }
    }
}

void ExpertCache::change_reading(int by) {
    const int64_t now = now_ns();
    counts_->busy_ns += reading_ > 0 ? now - last_change_ns_ : 0;
    last_change_ns_ = now;
    reading_ += by;
}

}  // namespace moec
