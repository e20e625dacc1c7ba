// Detects whether a file was written: by its size, the time of its last write and the time of its last change of any kind.

#pragma once

#include <cstdint>

namespace moec {

// Equal identities before and after: nothing was written in between.
struct FileIdentity {
    int64_t size_bytes = -1, modified_ns = 0, changed_ns = 0;

    bool operator==(const FileIdentity& other) const {
        return size_bytes == other.size_bytes && modified_ns == other.modified_ns && changed_ns == other.changed_ns;
    }
};

// The identity of an open file, in 0.3 us. size_bytes is -1 if the system does not report it.
FileIdentity identity_of(int descriptor);

}  // namespace moec
