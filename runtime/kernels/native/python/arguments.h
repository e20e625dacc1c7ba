// Arguments from Python. Arrays: checks dtype, rank, memory order and writability; each failure is a readable ValueError.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/detail/nb_list.h>

#include <cstdint>
#include <new>
#include <string>
#include <vector>

namespace moec {

namespace nb = nanobind;

enum class Kind { kUint8, kUint16, kUint32, kInt32, kInt64, kFloat16, kFloat32, kFloat64 };
enum class Access { kRead, kWrite };

// A C-contiguous array. It holds the buffer of the Python object while it lives. Create and destroy it with the interpreter
// lock; its memory may be used without the lock.
class Array {
  public:
    static constexpr int kMaxRank = 4;

    Array(nb::handle object, const char* name, Kind kind, int rank, Access access = Access::kRead);
    ~Array() { PyBuffer_Release(&view_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    int64_t size(int axis) const { return view_.shape[axis]; }
    int64_t bytes() const { return view_.len; }
    const char* name() const { return name_; }

    template <class Value>
    Value* data() const {
        return static_cast<Value*>(view_.buf);
    }

    // Raises ValueError if the shape differs.
    void expect(std::initializer_list<int64_t> shape) const;
    // Raises ValueError if a value of an int32 or int64 array lies outside [0, count).
    void expect_indices(int64_t count) const;
    // Raises ValueError if the two arrays share memory.
    void expect_apart(const Array& other) const;

  private:
    Py_buffer view_;
    const char* name_;
    Kind kind_;
};

// Whether an object is an array of half floats.
bool is_half(nb::handle object);

[[noreturn]] void refuse(const std::string& message);

// Raises MemoryError if an operation had no memory for its scratch.
inline void expect_memory(bool has_memory) {
    if (!has_memory) {
        throw std::bad_alloc();
    }
}

}  // namespace moec

// Lists. nanobind/stl/vector.h is not used, because its conversion is noexcept: a list without enough memory would end the
// process. This conversion raises MemoryError.
namespace nanobind::detail {

template <typename Entry>
struct type_caster<std::vector<Entry>> : list_caster<std::vector<Entry>, Entry> {
    bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) {
        std::vector<Entry>& value = this->value;
        value.clear();
        if (!PySequence_Check(source.ptr()) || PyUnicode_Check(source.ptr()) || PyBytes_Check(source.ptr())) {
            return false;
        }
        const object items = steal(PySequence_Fast(source.ptr(), ""));
        const Py_ssize_t size = items.is_valid() ? PySequence_Size(items.ptr()) : -1;
        if (size < 0) {
            PyErr_Clear();
            return false;
        }
        value.reserve(static_cast<size_t>(size));
        const uint32_t entry_flags = flags_for_local_caster<Entry>(flags);
        for (Py_ssize_t i = 0; i < size; ++i) {
            const object item = steal(PySequence_GetItem(items.ptr(), i));  // the stable ABI has no faster way
            if (!item.is_valid()) {
                PyErr_Clear();
                return false;
            }
            make_caster<Entry> entry;
            if (!entry.from_python(item, entry_flags, cleanup) || !entry.template can_cast<Entry>()) {
                return false;
            }
            value.push_back(entry.operator cast_t<Entry>());
        }
        return true;
    }
};

}  // namespace nanobind::detail
