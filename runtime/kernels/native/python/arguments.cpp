// Checks of arrays. Messages have the form `name: expected X, found Y`.

#include "python/arguments.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

namespace moec {
namespace {

struct KindFacts {
    const char* name;
    const char* codes;  // codes of the struct module for this kind, with the item size below
    Py_ssize_t item_bytes;
};

KindFacts facts_of(Kind kind) {
    switch (kind) {
        case Kind::kUint8:
            return {"uint8", "B", 1};
        case Kind::kUint16:
            return {"uint16", "H", 2};
        case Kind::kUint32:
            return {"uint32", "IL", 4};
        case Kind::kInt32:
            return {"int32", "il", 4};
        case Kind::kInt64:
            return {"int64", "lq", 8};
        case Kind::kFloat16:
            return {"float16", "e", 2};
        case Kind::kFloat64:
            return {"float64", "d", 8};
        default:
            return {"float32", "f", 4};
    }
}

bool has_kind(const Py_buffer& view, const KindFacts& facts) {
    const char* format = view.format != nullptr ? view.format : "B";
    if (*format == '@' || *format == '=' || *format == '<') {
        ++format;
    }
    return view.itemsize == facts.item_bytes && std::strlen(format) == 1 && std::strchr(facts.codes, *format) != nullptr;
}

std::string text_of(const int64_t* shape, size_t rank) {
    std::string text = "(";
    for (size_t i = 0; i < rank; ++i) {
        text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
    }
    return text + ")";
}

template <class Value>
void check_indices(const Value* values, int64_t size, int64_t count, const char* name) {
    for (int64_t i = 0; i < size; ++i) {
        if (values[i] < 0 || values[i] >= count) {
            refuse(std::string(name) + ": expected indices below " + std::to_string(count) + ", found " +
                   std::to_string(values[i]));
        }
    }
}

}  // namespace

bool is_half(nb::handle object) {
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
        PyErr_Clear();
        return false;
    }
    const bool found = has_kind(view, facts_of(Kind::kFloat16));
    PyBuffer_Release(&view);
    return found;
}

void refuse(const std::string& message) {
    throw nb::value_error(message.c_str());
}

Array::Array(nb::handle object, const char* name, Kind kind, int rank, Access access) : name_(name), kind_(kind) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
        PyErr_Clear();
        refuse(std::string(name) + ": expected an array");
    }
    const KindFacts facts = facts_of(kind);
    std::string fault;
    if (!has_kind(view_, facts)) {
        fault =
            std::string("expected ") + facts.name + ", found format `" + (view_.format != nullptr ? view_.format : "B") + "`";
    } else if (view_.ndim != rank) {
        fault = "expected " + std::to_string(rank) + " dimensions, found " + std::to_string(view_.ndim);
    } else if (PyBuffer_IsContiguous(&view_, 'C') == 0) {
        fault = "expected C-contiguous memory";
    } else if (access == Access::kWrite && view_.readonly != 0) {
        fault = "expected a writable array";
    } else if (reinterpret_cast<uintptr_t>(view_.buf) % static_cast<uintptr_t>(facts.item_bytes) != 0) {
        fault = "expected aligned memory";
    }
    if (!fault.empty()) {
        PyBuffer_Release(&view_);
        refuse(std::string(name) + ": " + fault);
    }
}

void Array::expect(std::initializer_list<int64_t> shape) const {
    int64_t found[kMaxRank];
    for (int i = 0; i < view_.ndim; ++i) {
        found[i] = view_.shape[i];
    }
    const bool is_same = shape.size() == static_cast<size_t>(view_.ndim) && std::equal(shape.begin(), shape.end(), found);
    if (!is_same) {
        refuse(std::string(name_) + ": expected shape " + text_of(shape.begin(), shape.size()) + ", found " +
               text_of(found, static_cast<size_t>(view_.ndim)));
    }
}

void Array::expect_indices(int64_t count) const {
    const int64_t size = view_.len / view_.itemsize;
    if (kind_ == Kind::kInt32) {
        check_indices(data<const int32_t>(), size, count, name_);
    } else {
        check_indices(data<const int64_t>(), size, count, name_);
    }
}

void Array::expect_apart(const Array& other) const {
    const uintptr_t mine = reinterpret_cast<uintptr_t>(view_.buf), theirs = reinterpret_cast<uintptr_t>(other.view_.buf);
    const bool is_apart =
        mine + static_cast<uintptr_t>(view_.len) <= theirs || theirs + static_cast<uintptr_t>(other.view_.len) <= mine;
    if (!is_apart) {
        refuse(std::string(name_) + " and " + other.name_ + ": expected separate memory");
    }
}

}  // namespace moec
