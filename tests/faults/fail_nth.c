// Preloaded into a process: the n-th call of a kind fails. Of calls on files, those under one folder count alone; of
// allocations, those of the extension, large ones of numpy, and anonymous mappings. `driver.py` arms it with ctypes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, SYNC = 4, RENAME = 8, OPEN = 16, TRUNCATE = 32, MAP = 64, ALLOCATE = 128 };
enum { ONCE = 0, FROM_THEN_ON = 1, SHORT = 2 };
enum { PASS = 0, FAIL = 1, HALVE = 2 };
// Above the buffers of numpy's iterators: where one of those fails, numpy 2.4 raises without the interpreter's lock and crashes.
enum { LARGE_BYTES = 65537, MOST_RANGES = 16 };

static char folder[4096];
static char failed_call[512];
static int kinds, fault_errno, way;
static long fail_at;
static atomic_long calls;
static atomic_int is_armed;
// Code of the objects whose allocations count. least: bytes from which on they do.
static struct { uintptr_t start, end; size_t least; } ranges[MOST_RANGES];
static int range_count;

static int note_object(struct dl_phdr_info *object, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *name = strrchr(object->dlpi_name, '/');
    const int is_ours = name && !strncmp(name, "/_native.", 9), is_numpy = name && !strncmp(name, "/_multiarray_umath", 18);
    for (int i = 0; (is_ours || is_numpy) && i < object->dlpi_phnum && range_count < MOST_RANGES; ++i) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X)) {
            const uintptr_t start = object->dlpi_addr + part->p_vaddr;
            ranges[range_count].start = start, ranges[range_count].end = start + part->p_memsz;
            ranges[range_count++].least = is_ours ? 1 : LARGE_BYTES;
        }
    }
    return 0;
}

void fail_nth_arm(const char *under, int which, long nth, int error, int how) {
    snprintf(folder, sizeof folder, "%s", under);
    failed_call[0] = 0, range_count = 0;
    dl_iterate_phdr(note_object, NULL);
    kinds = which, fail_at = nth, fault_errno = error, way = how;
    atomic_store(&calls, 0);
    atomic_store(&is_armed, 1);
}

// How many calls counted since fail_nth_arm.
long fail_nth_disarm(void) {
    atomic_store(&is_armed, 0);
    return atomic_load(&calls);
}

const char *fail_nth_call(void) { return failed_call; }

static int decide(int kind, const char *name, const char *place) {
    const long now = atomic_fetch_add(&calls, 1) + 1;
    if (fail_at <= 0 || now < fail_at || (now > fail_at && way != FROM_THEN_ON)) {
        return PASS;
    }
    if (now == fail_at) {
        snprintf(failed_call, sizeof failed_call, "%s %s", name, place);
    }
    if (way == SHORT && kind & (READ | WRITE)) {
        return HALVE;
    }
    errno = fault_errno;
    return FAIL;
}

static int counts(int kind) { return atomic_load_explicit(&is_armed, memory_order_relaxed) && (kinds & kind); }

static int on_path(int kind, const char *name, const char *path) {
    if (!counts(kind) || strncmp(path, folder, strlen(folder)) != 0) {
        return PASS;
    }
    return decide(kind, name, path);
}

static int on_descriptor(int kind, const char *name, int descriptor) {
    if (!counts(kind)) {
        return PASS;
    }
    char link[64], path[4096];
    const int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) {
        return PASS;
    }
    path[length] = 0;
    return on_path(kind, name, path);
}

static int on_allocation(size_t size, const void *caller) {
    if (counts(ALLOCATE)) {
        for (int i = 0; i < range_count; ++i) {
            if ((uintptr_t)caller >= ranges[i].start && (uintptr_t)caller < ranges[i].end && size >= ranges[i].least) {
                return decide(ALLOCATE, ranges[i].least == 1 ? "allocation of the extension" : "allocation of numpy", "");
            }
        }
    }
    return PASS;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define ON(check) \
    const int fate = (check); \
    if (fate == FAIL) return -1
#define HALF(size) (fate == HALVE && (size) > 1 ? (size) / 2 : (size))
#define ONE_BUFFER(name, kind, buffer) \
    ssize_t name(int fd, buffer data, size_t size) { REAL(name); ON(on_descriptor(kind, #name, fd)); return real(fd, data, HALF(size)); }
#define AT_OFFSET(name, kind, buffer, offset) \
    ssize_t name(int fd, buffer data, size_t size, offset at) { REAL(name); ON(on_descriptor(kind, #name, fd)); return real(fd, data, HALF(size), at); }
// A short call of several buffers is one of half of the first.
static ssize_t first_half(int fd, const struct iovec *parts, off64_t at, int is_read) {
    const size_t half = parts[0].iov_len > 1 ? parts[0].iov_len / 2 : parts[0].iov_len;
    return is_read ? syscall(SYS_pread64, fd, parts[0].iov_base, half, at) : syscall(SYS_write, fd, parts[0].iov_base, half);
}
#define VECTOR(name, kind, declared, given, at) \
    ssize_t name(int fd, const struct iovec *parts, int count declared) { REAL(name); ON(on_descriptor(kind, #name, fd)); \
        return fate == HALVE ? first_half(fd, parts, at, kind == READ) : real(fd, parts, count given); }
#define COMMA ,

ONE_BUFFER(read, READ, void *)
ONE_BUFFER(write, WRITE, const void *)
AT_OFFSET(pread, READ, void *, off_t)
AT_OFFSET(pread64, READ, void *, off64_t)
AT_OFFSET(pwrite, WRITE, const void *, off_t)
AT_OFFSET(pwrite64, WRITE, const void *, off64_t)
VECTOR(writev, WRITE, , , 0)
VECTOR(preadv, READ, COMMA off_t at, COMMA at, at)
VECTOR(preadv64, READ, COMMA off64_t at, COMMA at, at)
VECTOR(preadv64v2, READ, COMMA off64_t at COMMA int flags, COMMA at COMMA flags, at)
int fsync(int fd) { REAL(fsync); ON(on_descriptor(SYNC, "fsync", fd)); return real(fd); }
int fdatasync(int fd) { REAL(fdatasync); ON(on_descriptor(SYNC, "fdatasync", fd)); return real(fd); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); ON(on_descriptor(TRUNCATE, "ftruncate", fd)); return real(fd, size); }
int rename(const char *from, const char *to) { REAL(rename); ON(on_path(RENAME, "rename", to)); return real(from, to); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); ON(on_path(RENAME, "renameat", to)); return real(a, from, b, to); }
int link(const char *from, const char *to) { REAL(link); ON(on_path(RENAME, "link", to)); return real(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) { REAL(linkat); ON(on_path(RENAME, "linkat", to)); return real(a, from, b, to, flags); }
int symlink(const char *to, const char *path) { REAL(symlink); ON(on_path(RENAME, "symlink", path)); return real(to, path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); ON(on_path(RENAME, "mkdir", path)); return real(path, mode); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    REAL(copy_file_range); ON(on_descriptor(WRITE, "copy_file_range", out)); return real(in, from, out, to, HALF(size), flags); }

#define OPENED(name, declared, given) \
    int name(declared const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); const mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        REAL(name); ON(on_path(OPEN, #name, path)); return real(given path, flags, mode); }
OPENED(open, , )
OPENED(open64, , )
OPENED(openat, int at COMMA, at COMMA)
OPENED(openat64, int at COMMA, at COMMA)

// glibc maps its own memory without asking here: what comes is of the mmap module, of libraries, and stacks of frames of the
// interpreter, 16 KiB each, without which CPython 3.11 waits for ever for a thread that it has started.
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    const int is_counted = size >= LARGE_BYTES && counts(ALLOCATE);
    const int fate = fd >= 0 ? on_descriptor(MAP, "mmap", fd) : is_counted ? decide(ALLOCATE, "anonymous mapping", "") : PASS;
    if (fate != PASS) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return real(at, size, protection, flags, fd, offset);
}

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
#define NONE_IF_FAILED(size) if (on_allocation(size, __builtin_return_address(0)) != PASS) { errno = ENOMEM; return NULL; }
void *malloc(size_t size) { NONE_IF_FAILED(size) return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { NONE_IF_FAILED(count * size) return __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { NONE_IF_FAILED(size) return __libc_realloc(old, size); }

static void refuse(void) {
    void (*raise)(void) = (void (*)(void))dlsym(dlopen("libstdc++.so.6", RTLD_LAZY), "_ZSt17__throw_bad_allocv");
    raise();
}
// operator new: plain, of arrays, aligned, and the two that return null.
#define NEW(name, rest, made, failed) \
    void *name(size_t size rest) { \
        void *found = on_allocation(size, __builtin_return_address(0)) == PASS ? (made) : NULL; \
        if (!found) failed; \
        return found; }
NEW(_Znwm, , __libc_malloc(size ? size : 1), refuse())
NEW(_Znam, , __libc_malloc(size ? size : 1), refuse())
NEW(_ZnwmSt11align_val_t, COMMA size_t alignment, __libc_memalign(alignment, size), refuse())
NEW(_ZnwmRKSt9nothrow_t, COMMA const void *unused, ((void)unused, __libc_malloc(size ? size : 1)), (void)0)
NEW(_ZnamRKSt9nothrow_t, COMMA const void *unused, ((void)unused, __libc_malloc(size ? size : 1)), (void)0)
