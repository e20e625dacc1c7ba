// List arguments of bindings. nanobind/stl/vector.h is not used, because its conversion is noexcept: a list without enough
// memory would end the process. This conversion raises MemoryError.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/detail/nb_list.h>

#include <vector>

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
