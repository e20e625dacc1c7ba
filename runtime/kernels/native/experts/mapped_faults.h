// Mapped files whose pages may stop existing: a file that another process makes shorter, a disk that fails. The system then
// sends SIGBUS to the thread that touches the page, and the process ends. Here it gets pages of zeros instead, from the one
// that is missing to the end of the mapping, and the fault is counted: whoever computed with the mapping asks afterwards.
// No thread needs a guard, and nothing is done for pages that exist.

#pragma once

#include <cstddef>
#include <cstdint>

namespace moec {

// Watch whole pages of a mapping. Returns a number for the calls below; -1 where the system knows no such signal.
int64_t watch_mapping(uintptr_t address, size_t size_bytes);
// Whether a page of it was missing.
bool has_faulted(int64_t watch);
// A watched mapping, the file that is mapped, and the identity that it had then.
struct MappedFileState {
    int64_t watch, descriptor, size_bytes, modified_ns, changed_ns;
};
// The first of some whose file has changed or had a missing page; -1: none.
int64_t first_changed(const MappedFileState* files, int64_t count);
// Before the mapping ends. The number is given out again.
void forget_mapping(int64_t watch);

}  // namespace moec
