// Bindings of the steps of a quantizer. They run on the calling thread. Types and meanings: runtime/kernels/_native.pyi.

#include "python/bindings.h"

#include <memory>
#include <string>

#include "python/arguments.h"
#include "targets/kernel_table.h"

namespace moec {
namespace {

constexpr int kScratchLanes = 8;

// Memory of a kernel that begins at a cache line.
class Scratch {
  public:
    explicit Scratch(size_t count) : memory_(new float[count + kLineFloats]) {}
    float* data() const {
        const uintptr_t first = reinterpret_cast<uintptr_t>(memory_.get()), line = kLineFloats * sizeof(float);
        return reinterpret_cast<float*>((first + line - 1) / line * line);
    }

  private:
    static constexpr size_t kLineFloats = 16;
    std::unique_ptr<float[]> memory_;
};

// Raises ValueError unless all groups of `columns` columns have the same size, a multiple of `multiple`.
void expect_groups(int64_t columns, int64_t groups, int64_t multiple) {
    if (groups < 1 || columns < groups || columns % groups != 0 || columns / groups % multiple != 0) {
        refuse("groups: expected equal ones of a multiple of " + std::to_string(multiple) + " columns, found " +
               std::to_string(groups) + " of " + std::to_string(columns) + " columns");
    }
}

void expect_code(float largest) {
    if (!(largest >= 0.0f && largest <= 255.0f)) {
        refuse("largest: expected a code from 0 to 255, found " + std::to_string(largest));
    }
}

// Weights [K, N], and scales and minima of their groups, [G, N].
struct Grids {
    const Array weights, scales, minima;

    Grids(nb::handle weights_object, nb::handle scales_object, nb::handle minima_object, int64_t multiple, Access access)
        : weights(weights_object, "weights", Kind::kFloat32, 2),
          scales(scales_object, "scales", Kind::kFloat32, 2, access),
          minima(minima_object, "minima", Kind::kFloat32, 2, access) {
        expect_groups(weights.size(0), scales.size(0), multiple);
        scales.expect({scales.size(0), weights.size(1)});
        minima.expect({scales.size(0), weights.size(1)});
    }

    GridCall call() const {
        return {weights.data<const float>(), scales.data<const float>(), minima.data<const float>(),
                weights.size(0),             scales.size(0),             weights.size(1)};
    }
};

void bind_search_ranges(nb::handle weights_object, nb::handle importance_object, nb::handle factors_object, float largest,
                        float centre, bool is_symmetric, bool is_ternary, nb::handle scales_object, nb::handle minima_object) {
    const Grids grids(weights_object, scales_object, minima_object, 1, Access::kWrite);
    const Array importance(importance_object, "importance", Kind::kFloat32, 1);
    const Array factors(factors_object, "factors", Kind::kFloat32, 1);
    const int64_t columns = grids.weights.size(0), groups = grids.scales.size(0), ranges = is_ternary ? 1 : factors.size(0);
    importance.expect({columns});
    expect_code(largest);
    if (ranges > kMaxRanges) {
        refuse("factors: expected at most " + std::to_string(kMaxRanges) + ", found " + std::to_string(ranges));
    }
    grids.scales.expect_apart(grids.weights);
    grids.minima.expect_apart(grids.weights);
    grids.minima.expect_apart(grids.scales);
    const Scratch scratch(is_ternary ? static_cast<size_t>(2 * kScratchLanes * (columns / groups)) : 0);
    const RangesCall call{grids.weights.data<const float>(),
                          importance.data<const float>(),
                          factors.data<const float>(),
                          is_ternary ? scratch.data() : nullptr,
                          grids.scales.data<float>(),
                          grids.minima.data<float>(),
                          columns,
                          groups,
                          grids.weights.size(1),
                          ranges,
                          largest,
                          centre,
                          is_symmetric};
    nb::gil_scoped_release unlocked;
    active_kernels().search_ranges(call);
}

void bind_nearest_codes(nb::handle weights_object, nb::handle scales_object, nb::handle minima_object, float largest,
                        nb::handle codes_object) {
    const Grids grids(weights_object, scales_object, minima_object, 1, Access::kRead);
    const Array codes(codes_object, "codes", Kind::kUint8, 2, Access::kWrite);
    codes.expect({grids.weights.size(0), grids.weights.size(1)});
    expect_code(largest);
    nb::gil_scoped_release unlocked;
    active_kernels().nearest_codes(grids.call(), largest, codes.data<uint8_t>());
}

void bind_differences(nb::handle weights_object, nb::handle codes_object, nb::handle scales_object, nb::handle minima_object,
                      nb::handle places_object, nb::handle out_object, nb::handle squares_object) {
    const Grids grids(weights_object, scales_object, minima_object, kColumnsPerTile, Access::kRead);
    const Array codes(codes_object, "codes", Kind::kUint8, 2), squares(squares_object, "squares", Kind::kFloat64, 1, Access::kWrite);
    const int64_t columns = grids.weights.size(0), rows = grids.weights.size(1);
    codes.expect({columns, rows});
    squares.expect({rows});
    std::unique_ptr<Array> places, out;
    if (!out_object.is_none()) {
        places = std::make_unique<Array>(places_object, "places", Kind::kInt64, 1);
        out = std::make_unique<Array>(out_object, "out", Kind::kFloat32, 2, Access::kWrite);
        places->expect({columns});
        places->expect_indices(columns);
        out->expect({columns, rows});
        out->expect_apart(grids.weights);
    }
    const int64_t* const order = out == nullptr ? nullptr : places->data<const int64_t>();
    float* const result = out == nullptr ? nullptr : out->data<float>();
    nb::gil_scoped_release unlocked;
    active_kernels().differences(grids.call(), codes.data<const uint8_t>(), order, result, squares.data<double>());
}

void bind_code_sums(nb::handle products_object, nb::handle codes_object, float centre, nb::handle sums_object) {
    const Array products(products_object, "products", Kind::kFloat32, 2), codes(codes_object, "codes", Kind::kUint8, 2);
    const Array sums(sums_object, "sums", Kind::kFloat32, 2, Access::kWrite);
    const int64_t columns = products.size(0), rows = products.size(1);
    expect_groups(columns, sums.size(0), 1);
    codes.expect({columns, rows});
    sums.expect({sums.size(0), rows});
    sums.expect_apart(products);
    nb::gil_scoped_release unlocked;
    active_kernels().code_sums({products.data<const float>(), codes.data<const uint8_t>(), sums.data<float>(), sums.size(0),
                                columns / sums.size(0), rows, centre});
}

void bind_round_columns(nb::handle work_object, nb::handle factor_object, nb::handle order_object, nb::handle scales_object,
                        nb::handle inverses_object, nb::handle minima_object, nb::handle largest_object, int64_t begin,
                        int64_t end, nb::handle codes_object, nb::handle squares_object) {
    const Grids grids(work_object, scales_object, minima_object, 1, Access::kRead);
    const Array work(work_object, "work", Kind::kFloat32, 2, Access::kWrite), factor(factor_object, "factor", Kind::kFloat32, 2);
    const Array order(order_object, "order", Kind::kInt64, 1), inverses(inverses_object, "inverses", Kind::kFloat32, 2);
    const Array largest(largest_object, "largest", Kind::kUint8, 1);
    const Array codes(codes_object, "codes", Kind::kUint8, 2, Access::kWrite);
    const Array squares(squares_object, "squares", Kind::kFloat64, 1, Access::kWrite);
    const int64_t columns = work.size(0), rows = work.size(1), groups = grids.scales.size(0);
    factor.expect({columns, columns});
    order.expect({columns});
    order.expect_indices(columns);
    inverses.expect({groups, rows});
    largest.expect({rows});
    codes.expect({columns, rows});
    squares.expect({rows});
    work.expect_apart(factor);
    if (begin < 0 || end < begin || end > columns || end - begin > kMaxRoundedColumns) {
        refuse("columns: expected at most " + std::to_string(kMaxRoundedColumns) + " of " + std::to_string(columns) +
               ", found " + std::to_string(begin) + " to " + std::to_string(end));
    }
    const ColumnsCall call{work.data<float>(),
                           factor.data<const float>(),
                           order.data<const int64_t>(),
                           grids.scales.data<const float>(),
                           inverses.data<const float>(),
                           grids.minima.data<const float>(),
                           largest.data<const uint8_t>(),
                           codes.data<uint8_t>(),
                           squares.data<double>(),
                           columns,
                           groups,
                           rows,
                           begin,
                           end};
    nb::gil_scoped_release unlocked;
    active_kernels().round_columns(call);
}

void bind_code_systems(nb::handle codes_object, float centre, nb::handle moment_object, nb::handle sums_object, int64_t first,
                       nb::handle systems_object) {
    const Array codes(codes_object, "codes", Kind::kUint8, 2), moment(moment_object, "moment", Kind::kFloat32, 2);
    const Array sums(sums_object, "sums", Kind::kFloat32, 2);
    const Array systems(systems_object, "systems", Kind::kFloat32, 3, Access::kWrite);
    const int64_t columns = codes.size(0), size = systems.size(0), rows = systems.size(2);
    const int64_t groups = sums.size(0) == 0 ? size : sums.size(0);
    moment.expect({columns, columns});
    if (sums.size(0) != 0) {
        sums.expect({groups, columns});
    }
    systems.expect({sums.size(0) == 0 ? groups : 2 * groups, size, rows});
    systems.expect({size, size, rows});
    systems.expect_apart(moment);
    expect_groups(columns, groups, kColumnsPerTile);
    if (first < 0 || first > codes.size(1) - rows) {
        refuse("first: expected a row with " + std::to_string(rows) + " after it, found " + std::to_string(first) + " of " +
               std::to_string(codes.size(1)));
    }
    nb::gil_scoped_release unlocked;
    const Scratch scratch(static_cast<size_t>(columns * kSystemTile));
    active_kernels().code_systems({codes.data<const uint8_t>() + first, moment.data<const float>(), sums.data<const float>(),
                                   systems.data<float>(), scratch.data(), columns, groups, rows, codes.size(1), size, centre});
}

// Symmetric matrices [P, P, count], with vectors [P, count].
struct Systems {
    const Array systems, given, out;

    Systems(nb::handle systems_object, nb::handle given_object, nb::handle out_object)
        : systems(systems_object, "systems", Kind::kFloat32, 3),
          given(given_object, "given", Kind::kFloat32, 2),
          out(out_object, "out", Kind::kFloat32, 2, Access::kWrite) {
        given.expect({systems.size(0), systems.size(2)});
        out.expect({systems.size(0), systems.size(2)});
        systems.expect({systems.size(0), systems.size(0), systems.size(2)});
        out.expect_apart(systems);
        out.expect_apart(given);
    }

    SystemsCall call() const { return {systems.data<const float>(), systems.size(0), systems.size(2)}; }
};

void bind_multiply_systems(nb::handle systems_object, nb::handle x_object, nb::handle out_object) {
    const Systems arrays(systems_object, x_object, out_object);
    nb::gil_scoped_release unlocked;
    active_kernels().multiply_systems(arrays.call(), arrays.given.data<const float>(), arrays.out.data<float>());
}

void bind_solve_systems(nb::handle systems_object, nb::handle diagonal_object, nb::handle right_object) {
    const Systems arrays(systems_object, diagonal_object, right_object);
    const size_t size = static_cast<size_t>(arrays.systems.size(0));
    nb::gil_scoped_release unlocked;
    const Scratch scratch(2 * size * size * kScratchLanes);
    active_kernels().solve_systems(arrays.call(), arrays.given.data<const float>(), arrays.out.data<float>(), scratch.data());
}

}  // namespace

void bind_quantizer(nb::module_& module) {
    using namespace nanobind::literals;
    module.def("search_ranges", bind_search_ranges, "weights"_a, "importance"_a, "factors"_a, "largest"_a, "centre"_a,
               "symmetric"_a, "ternary"_a, "scales"_a, "minima"_a);
    module.def("nearest_codes", bind_nearest_codes, "weights"_a, "scales"_a, "minima"_a, "largest"_a, "codes"_a);
    module.def("differences", bind_differences, "weights"_a, "codes"_a, "scales"_a, "minima"_a, "places"_a.none(),
               "out"_a.none(), "squares"_a);
    module.def("code_sums", bind_code_sums, "products"_a, "codes"_a, "centre"_a, "sums"_a);
    module.def("round_columns", bind_round_columns, "work"_a, "factor"_a, "order"_a, "scales"_a, "inverses"_a, "minima"_a,
               "largest"_a, "begin"_a, "end"_a, "codes"_a, "squares"_a);
    module.def("code_systems", bind_code_systems, "codes"_a, "centre"_a, "moment"_a, "sums"_a, "first"_a,
               "systems"_a);
    module.def("multiply_systems", bind_multiply_systems, "systems"_a, "x"_a, "out"_a);
    module.def("solve_systems", bind_solve_systems, "systems"_a, "diagonal"_a, "right"_a);
}

}  // namespace moec
