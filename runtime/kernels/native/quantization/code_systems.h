// Least squares of a quantizer, written once over eight or sixteen lanes. This file has no include guard: each
// targets/kernels_*.cpp includes it inside its own namespace, after products/linear.h.
//
// Lanes are rows of the weights. Every entry of a system is one chain of fma over the columns of its groups, in order.
// Accuracy class: bit-equal across instruction sets.

constexpr int kSystemRows = kSystemVectors * kLanes;
static_assert(kSystemTile % kSystemRows == 0 && kColumnsPerTile % kSystemColumns == 0, "tiles and groups are whole steps");

// Sums over `width` codes from `codes` on, times the numbers of each of kSystemColumns rows of a matrix.
MOEC_INLINE void sum_codes(const float* const* rows, const float* codes, int64_t first, int64_t width,
                           Floats (&sums)[kSystemColumns][kSystemVectors]) {
    unroll<kSystemColumns * kSystemVectors>([&](auto i) MOEC_INLINE_LAMBDA {
        sums[decltype(i)::value / kSystemVectors][decltype(i)::value % kSystemVectors] = zero();
    });
    for (int64_t k = first; k < first + width; ++k) {
        Floats own[kSystemVectors];
        unroll<kSystemVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            own[decltype(v)::value] = load(codes + k * kSystemRows + decltype(v)::value * kLanes);
        });
        unroll<kSystemColumns>([&](auto c) MOEC_INLINE_LAMBDA {
            constexpr int C = decltype(c)::value;
            const Floats factor = broadcast(rows[C][k]);
            unroll<kSystemVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                sums[C][V] = fma(factor, own[V], sums[C][V]);
            });
        });
    }
}

// See CodeSystemsCall. Codes of kSystemTile rows become floats at a time.
inline void code_systems(const CodeSystemsCall& call) {
    const int64_t width = call.columns / call.groups, summed = call.size > call.groups ? call.groups : 0;
    const Floats centre = broadcast(-call.centre), one = broadcast(1.0f);
    for (int64_t at = 0; at < call.rows; at += kSystemTile) {
        const int64_t rows = call.rows - at < kSystemTile ? call.rows - at : kSystemTile;
        for (int64_t k = 0; k < call.columns; ++k) {
            uint8_t bytes[kSystemTile] = {};
            std::memcpy(bytes, call.codes + k * call.distance + at, static_cast<size_t>(rows));
            for (int i = 0; i < kSystemTile; i += kLanes) {
                float* out = call.scratch + (i / kSystemRows * call.columns + k) * kSystemRows + i % kSystemRows;
                store(out, fma(to_float(load_bytes(bytes + i)), one, centre));
            }
        }
        // Columns of H, then sums of columns.
        for (int64_t column = 0; column < call.columns + summed; column += kSystemColumns) {
            const bool is_sum = column >= call.columns;
            const float* factors[kSystemColumns];
            for (int c = 0; c < kSystemColumns; ++c) {
                const int64_t sum = column + c - call.columns;
                factors[c] = is_sum ? call.sums + (sum < summed ? sum : 0) * call.columns : call.moment + (column + c) * call.columns;
            }
            const int64_t last = is_sum ? call.groups - 1 : column / width;
            for (int64_t row = 0; row < rows; row += kSystemRows) {
                const float* codes = call.scratch + row * call.columns;
                for (int64_t group = 0; group <= last; ++group) {
                    Floats sums[kSystemColumns][kSystemVectors];
                    sum_codes(factors, codes, group * width, width, sums);
                    unroll<kSystemVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                        constexpr int V = decltype(v)::value;
                        const int64_t left = rows - row - V * kLanes;
                        const int count = left < 0 ? 0 : lanes_left<kLanes>(left, 0);
                        float* out = call.systems + group * call.size * call.rows + at + row + V * kLanes;
                        if (is_sum) {
                            unroll<kSystemColumns>([&](auto c) MOEC_INLINE_LAMBDA {
                                const int64_t sum = column + decltype(c)::value - call.columns;
                                if (sum < summed) {
                                    store_partial(out + (call.groups + sum) * call.rows, sums[decltype(c)::value][V], count);
                                }
                            });
                            return;
                        }
                        Floats total = column % width == 0 ? zero() : load_partial(out + last * call.rows, count);
                        unroll<kSystemColumns>([&](auto c) MOEC_INLINE_LAMBDA {
                            constexpr int C = decltype(c)::value;
                            total = fma(load(codes + (column + C) * kSystemRows + V * kLanes), sums[C][V], total);
                        });
                        store_partial(out + last * call.rows, total, count);
                    });
                }
            }
        }
    }
}
