// What tells whether a file was written to: its size, and the times of the last change of its content and of anything.

#pragma once

#include <cstdint>

namespace moec {

// Equal before and after: nothing was written in between.
struct FileIdentity {
    int64_t size_bytes = -1, modified_ns = 0, changed_ns = 0;

    bool operator==(const FileIdentity& other) const {
        return size_bytes == other.size_bytes && modified_ns == other.modified_ns && changed_ns == other.changed_ns;
    }
};

// Of an open file, in 0.3 us; size -1 where the system cannot tell.
FileIdentity identity_of(int descriptor);

}  // namespace moec
