#include "experts/mapped_faults.h"

#include <atomic>
#include <mutex>

#if defined(__unix__) || defined(__APPLE__)
#define MOEC_HAS_SIGBUS 1
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace moec {
#if defined(MOEC_HAS_SIGBUS)
namespace {

// An entry of a list that only grows, because the handler may read it at any moment. An unused entry has no bytes.
struct Watch {
    std::atomic<uintptr_t> start{0}, end{0};
    std::atomic<bool> has_faulted{false};
    int64_t number = 0;
    bool is_free = false;  // changed under `change`
    Watch* next = nullptr;
};

std::atomic<Watch*> watches{nullptr};
std::atomic<bool> was_any_missing{false};
std::mutex change;
struct sigaction former;
uintptr_t page_bytes = 4096;

// Call what handled the signal before: a handler, or the default, which ends the process when the instruction runs again.
void pass_on(int number, siginfo_t* about, void* context) {
    if ((former.sa_flags & SA_SIGINFO) != 0 && former.sa_sigaction != nullptr) {
        former.sa_sigaction(number, about, context);
    } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
        former.sa_handler(number);
    } else if (about->si_code > 0 || former.sa_handler == SIG_DFL) {
        struct sigaction original {};
        original.sa_handler = SIG_DFL;
        ::sigaction(number, &original, nullptr);
        if (about->si_code <= 0) {  // another process sent it, so no instruction runs again
            ::raise(number);
        }
    }
}

void on_missing_page(int number, siginfo_t* about, void* context) {
    const int error = errno;
    const uintptr_t at = reinterpret_cast<uintptr_t>(about->si_addr);
    for (Watch* watch = about->si_code > 0 ? watches.load(std::memory_order_acquire) : nullptr; watch != nullptr;
         watch = watch->next) {
        const uintptr_t end = watch->end.load(std::memory_order_acquire);
        if (at < watch->start.load(std::memory_order_acquire) || at >= end) {
            continue;
        }
        watch->has_faulted.store(true, std::memory_order_release);
        was_any_missing.store(true, std::memory_order_release);
        const uintptr_t page = at & ~(page_bytes - 1);
        void* const start = reinterpret_cast<void*>(page);
        if (::mmap(start, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
            errno = error;
            return;
        }
        break;
    }
    errno = error;
    pass_on(number, about, context);
}

bool install() {
    page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    struct sigaction own {};
    own.sa_sigaction = on_missing_page;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&own.sa_mask);
    return ::sigaction(SIGBUS, &own, &former) == 0;
}

Watch* find(int64_t number) {
    for (Watch* watch = watches.load(std::memory_order_acquire); watch != nullptr; watch = watch->next) {
        if (watch->number == number) {
            return watch;
        }
    }
    return nullptr;
}

}  // namespace

int64_t watch_mapping(uintptr_t address, size_t size_bytes) {
    const std::lock_guard<std::mutex> lock(change);
    static const bool is_installed = install();
    if (!is_installed) {
        return -1;
    }
    Watch* watch = watches.load(std::memory_order_relaxed);
    while (watch != nullptr && !watch->is_free) {
        watch = watch->next;
    }
    const bool is_new = watch == nullptr;
    if (is_new) {
        watch = new Watch;
        watch->next = watches.load(std::memory_order_relaxed);
        watch->number = watch->next == nullptr ? 0 : watch->next->number + 1;
    }
    watch->is_free = false;
    watch->has_faulted.store(false, std::memory_order_relaxed);
    watch->start.store(address, std::memory_order_release);
    watch->end.store(address + size_bytes, std::memory_order_release);
    if (is_new) {
        watches.store(watch, std::memory_order_release);
    }
    return watch->number;
}

bool has_faulted(int64_t number) {
    if (!was_any_missing.load(std::memory_order_acquire)) {
        return false;
    }
    const Watch* const watch = find(number);
    return watch != nullptr && watch->has_faulted.load(std::memory_order_acquire);
}

void forget_mapping(int64_t number) {
    const std::lock_guard<std::mutex> lock(change);
    Watch* const watch = find(number);
    if (watch != nullptr && !watch->is_free) {
        watch->end.store(0, std::memory_order_release);
        watch->start.store(0, std::memory_order_release);
        watch->is_free = true;
    }
}

#else

int64_t watch_mapping(uintptr_t, size_t) {
    return -1;
}

bool has_faulted(int64_t) {
    return false;
}

void forget_mapping(int64_t) {}

#endif

FileIdentity identity_of(int descriptor) {
#if defined(MOEC_HAS_SIGBUS)
    struct stat found;
    if (::fstat(descriptor, &found) == 0) {
#if defined(__APPLE__)
        const timespec modified = found.st_mtimespec, changed = found.st_ctimespec;
#else
        const timespec modified = found.st_mtim, changed = found.st_ctim;
#endif
        const auto ns = [](const timespec& time) { return static_cast<int64_t>(time.tv_sec) * 1000000000 + time.tv_nsec; };
        return {static_cast<int64_t>(found.st_size), ns(modified), ns(changed)};
    }
#else
    static_cast<void>(descriptor);
#endif
    return {};
}

int64_t first_changed(const MappedFileState* files, int64_t count) {
    for (int64_t at = 0; at < count; ++at) {
        const MappedFileState& file = files[at];
        const FileIdentity known{file.size_bytes, file.modified_ns, file.changed_ns};
        if (has_faulted(file.watch) || !(identity_of(static_cast<int>(file.descriptor)) == known)) {
            return at;
        }
    }
    return -1;
}

}  // namespace moec
