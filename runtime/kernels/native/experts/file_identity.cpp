#include "experts/file_identity.h"

#if defined(__unix__) || defined(__APPLE__)
#define MOEC_HAS_FSTAT 1
#include <sys/stat.h>
#endif

namespace moec {

FileIdentity identity_of(int descriptor) {
#if defined(MOEC_HAS_FSTAT)
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

}  // namespace moec
