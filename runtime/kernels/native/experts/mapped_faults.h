// Detects whether a file was written, and protects from SIGBUS. Pages of a mapped file may disappear: another process shortens
// the file, or a disk fails. The system then sends SIGBUS to the thread that touches such a page, and the process ends. Here
// the handler maps zeros instead, from the missing page to the end of the mapping, and notes the fault. The caller checks for
// faults after the computation. No thread needs a guard, and existing pages cost nothing.

#pragma once

#include <cstddef>
#include <cstdint>

namespace moec {

// The size of a file, the time of its last write and of its last change of any kind. Equal identities before and after:
// nothing was written in between.
struct FileIdentity {
    int64_t size_bytes = -1, modified_ns = 0, changed_ns = 0;

    bool operator==(const FileIdentity& other) const {
        return size_bytes == other.size_bytes && modified_ns == other.modified_ns && changed_ns == other.changed_ns;
    }
};

// The identity of an open file, in 0.3 us. size_bytes is -1 if the system does not report it.
FileIdentity identity_of(int descriptor);

// Watch whole pages of a mapping. Returns a number for the calls below, or -1 if the system has no such signal.
int64_t watch_mapping(uintptr_t address, size_t size_bytes);
// Returns whether a page of a watched mapping was missing.
bool has_faulted(int64_t watch);
// A watched mapping, the file that is mapped, and the identity of the file at that time.
struct MappedFileState {
    int64_t watch, descriptor, size_bytes, modified_ns, changed_ns;
};
// Returns the index of the first file that has changed or had a missing page, or -1.
int64_t first_changed(const MappedFileState* files, int64_t count);
// Stop watching. Call it before the mapping ends. The number is used again.
void forget_mapping(int64_t watch);

}  // namespace moec
