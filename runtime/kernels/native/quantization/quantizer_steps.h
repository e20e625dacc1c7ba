// The steps of a quantizer between its matrix products, written once over eight lanes: ranges of groups, codes, GPTQ's columns.
// This file has no include guard: each targets/kernels_*.cpp includes it inside its own namespace, after lanes/eight_lanes.h.
//
// - Lanes are rows of the weights, and weights are stored column by column: [K, N]. So no sum goes across lanes.
// - Sums over the columns of a group are chains of fma, in order.
// - Accuracy class: bit-equal across instruction sets, for finite weights.

constexpr int kStepVectors = 8;
constexpr int kStepRows = kStepVectors * kLanes;

MOEC_INLINE Floats magnitude_of(Floats a) { return float_of(without(bits_of(a), broadcast_int(0x80000000u))); }

// Whole numbers from 0 to 255 in the first `count` lanes, as bytes.
MOEC_INLINE void store_codes(uint8_t* p, Floats codes, int count) {
    int8_t bytes[kLanes];
    store_low_bytes(bytes, shift_right_signed<24>(shift_left<24>(to_int(codes))));
    std::memcpy(p, bytes, static_cast<size_t>(count));
}

// To nearest even, from 0 to `largest`.
MOEC_INLINE Floats rounded_code(Floats a, Floats largest) {
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23
    return sub(add(smaller(larger(a, zero()), largest), magic), magic);
}

// The nearest float16, and the distance to its neighbours away from zero. Beyond float16: infinite.
struct Halves {
    Floats nearest, step;
};
MOEC_INLINE Halves halves_of(Floats a) {
    const Floats binade = larger(float_of(mask(bits_of(a), 0x7F800000u)), broadcast(6.103515625e-5f));  // at least 2^-14
    const Floats magic = mul(binade, broadcast(12288.0f));  // 1.5 * 2^13: the last bit of the sum is that of a half float
    return {sub(add(a, magic), magic), mul(binade, broadcast(9.765625e-4f))};
}
MOEC_INLINE Floats half_above(Floats a) {  // a >= 0
    const Floats infinite = float_of(broadcast_int(0x7F800000u));
    const Halves halves = halves_of(a);
    const Floats found = choose(less(halves.nearest, a), add(halves.nearest, halves.step), halves.nearest);
    return choose(less(broadcast(65504.0f), found), infinite, found);
}
MOEC_INLINE Floats half_below(Floats a) {
    const Floats infinite = float_of(broadcast_int(0x7F800000u));
    const Halves halves = halves_of(a);
    const Floats found = choose(less(a, halves.nearest), sub(halves.nearest, halves.step), halves.nearest);
    return choose(less(found, broadcast(-65504.0f)), sub(zero(), infinite), found);
}

struct Grid {
    Floats scale, minimum;
};
MOEC_INLINE Grid grid_of(const RangesCall& call, Floats low, Floats high) {
    if (call.is_symmetric) {
        const Floats scale = half_above(div(high, broadcast(call.largest - call.centre)));
        return {scale, mul(sub(zero(), scale), broadcast(call.centre))};
    }
    const Floats minimum = half_below(low);
    return {half_above(div(sub(high, minimum), broadcast(call.largest))), minimum};
}

MOEC_INLINE Floats divisor_of(Floats scale) { return choose(less(zero(), scale), scale, broadcast(1.0f)); }

// The best scale of three values in one group of rows: S / W of the k largest magnitudes with the greatest S^2 / W, where S is
// sum w |x| and W is sum w. Magnitudes are sorted by Batcher's merge exchange (Knuth, The Art of Computer Programming, volume
// 3, 5.2.2, algorithm M).
MOEC_INLINE Floats best_of_three(const RangesCall& call, int64_t group, int64_t row, int count) {
    const int64_t width = call.columns / call.groups;
    float *keys = call.scratch, *shares = keys + width * kLanes;
    int64_t half = 1;
    while (2 * half < width) {
        half *= 2;
    }
    for (int64_t k = 0; k < width; ++k) {
        const int64_t column = group * width + k;
        store(keys + k * kLanes, magnitude_of(load_partial(call.weights + column * call.rows + row, count)));
        store(shares + k * kLanes, broadcast(call.importance[column]));
    }
    for (int64_t p = half; p > 0; p /= 2) {
        for (int64_t q = half, r = 0, distance = p;; distance = q - p, q /= 2, r = p) {
            for (int64_t i = 0; i < width - distance; ++i) {
                if ((i & p) != r) {
                    continue;
                }
                float *one = keys + i * kLanes, *two = one + distance * kLanes;
                float *own = shares + i * kLanes, *other = own + distance * kLanes;
                const Floats a = load(one), b = load(two), c = load(own), d = load(other);
                const Ints is_less = less(a, b);
                store(one, choose(is_less, b, a));
                store(two, choose(is_less, a, b));
                store(own, choose(is_less, d, c));
                store(other, choose(is_less, c, d));
            }
            if (q == p) {
                break;
            }
        }
    }
    Floats sum = zero(), mass = zero(), most = broadcast(-1.0f), best = zero();
    for (int64_t k = 0; k < width; ++k) {
        const Floats share = load(shares + k * kLanes);
        sum = fma(share, load(keys + k * kLanes), sum);
        mass = add(mass, share);
        const Floats scale = div(sum, larger(mass, broadcast(1.17549435e-38f))), gain = mul(scale, sum);
        const Ints is_better = less(most, gain);
        most = choose(is_better, gain, most);
        best = choose(is_better, scale, best);
    }
    return best;
}

// The grid of each group with the least squared error: that of the whole range, of a smaller one, or of the best three values.
inline void search_ranges(const RangesCall& call) {
    const int64_t width = call.columns / call.groups;
    for (int64_t group = 0; group < call.groups; ++group) {
        for (int64_t row = 0; row < call.rows; row += kLanes) {
            const int count = lanes_left<kLanes>(call.rows, row);
            const float* weights = call.weights + group * width * call.rows + row;
            Floats low = load_partial(weights, count), high = low;
            for (int64_t k = 1; k < width; ++k) {
                const Floats weight = load_partial(weights + k * call.rows, count);
                low = smaller(low, weight);
                high = larger(high, weight);
            }
            if (call.is_symmetric) {
                high = larger(high, sub(zero(), low));
                low = sub(zero(), high);
            }
            Grid grids[kMaxRanges + 1];
            Floats inverses[kMaxRanges + 1], errors[kMaxRanges + 1];
            const int64_t place = group * call.rows + row;
            const Floats middle = mul(add(low, high), broadcast(0.5f)), half = mul(sub(high, low), broadcast(0.5f));
            grids[0] = grid_of(call, low, high);
            for (int64_t i = 1; i <= call.range_count; ++i) {
                if (call.scratch != nullptr) {
                    high = best_of_three(call, group, row, count);
                    low = sub(zero(), high);
                } else {
                    const Floats reach = mul(broadcast(call.factors[i - 1]), half);
                    low = sub(middle, reach);
                    high = add(middle, reach);
                }
                grids[i] = grid_of(call, low, high);
            }
            for (int64_t i = 0; i <= call.range_count; ++i) {
                inverses[i] = div(broadcast(1.0f), divisor_of(grids[i].scale));
                errors[i] = zero();
            }
            for (int64_t k = 0; call.range_count > 0 && k < width; ++k) {
                const Floats weight = load_partial(weights + k * call.rows, count);
                const Floats share = broadcast(call.importance[group * width + k]);
                for (int64_t i = 0; i <= call.range_count; ++i) {
                    const Floats code =
                        rounded_code(mul(sub(weight, grids[i].minimum), inverses[i]), broadcast(call.largest));
                    const Floats error = sub(fma(code, grids[i].scale, grids[i].minimum), weight);
                    errors[i] = fma(mul(error, share), error, errors[i]);
                }
            }
            Grid best = grids[0];
            Floats least = errors[0];
            for (int64_t i = 1; i <= call.range_count; ++i) {
                const Ints is_better = less(errors[i], least);
                least = choose(is_better, errors[i], least);
                best.scale = choose(is_better, grids[i].scale, best.scale);
                best.minimum = choose(is_better, grids[i].minimum, best.minimum);
            }
            store_partial(call.scales + place, best.scale, count);
            store_partial(call.minima + place, best.minimum, count);
        }
    }
}

// The nearest code of each weight.
inline void nearest_codes(const GridCall& call, float largest, uint8_t* codes) {
    for (int64_t k = 0; k < call.columns; ++k) {
        const int64_t group = k / (call.columns / call.groups) * call.rows;
        for (int64_t row = 0; row < call.rows; row += kLanes) {
            const int count = lanes_left<kLanes>(call.rows, row);
            const Floats weight = load_partial(call.weights + k * call.rows + row, count);
            const Floats minimum = load_partial(call.minima + group + row, count);
            const Floats divisor = divisor_of(load_partial(call.scales + group + row, count));
            store_codes(codes + k * call.rows + row, rounded_code(div(sub(weight, minimum), divisor), broadcast(largest)), count);
        }
    }
}

// Run over rows, kStepRows at a time. body(row, is_whole): is_whole is a type with a constant `value`.
template <class Body>
MOEC_INLINE void in_steps(int64_t rows, const Body& body) {
    int64_t row = 0;
    for (; row + kStepRows <= rows; row += kStepRows) {
        body(row, Index<1>{});
    }
    if (row < rows) {
        body(row, Index<0>{});
    }
}

// Lanes of vector `v` of a step that begins at `row`.
MOEC_INLINE int lanes_of_step(int64_t rows, int64_t row, int v) {
    const int64_t left = rows - row - v * kLanes;
    return left < 0 ? 0 : lanes_left<kLanes>(left, 0);
}
template <bool IsWhole>
MOEC_INLINE Floats load_step(const float* p, int count) {
    return IsWhole ? load(p) : load_partial(p, count);
}

template <bool IsWhole>
MOEC_INLINE Floats load_codes(const uint8_t* p, int count) {
    uint8_t bytes[kLanes] = {};
    if constexpr (!IsWhole) {
        std::memcpy(bytes, p, static_cast<size_t>(count));
        p = bytes;
    }
    return to_float(load_bytes(p));
}

// Add sums of 32 bits to those of 64 bits.
MOEC_INLINE void add_sums(double* totals, Floats sums, int count) {
    float values[kLanes];
    store(values, sums);
    for (int i = 0; i < count; ++i) {
        totals[i] += values[i];
    }
}

// What codes stand for, minus the weights, and the sum of its squares in each row.
inline void differences(const GridCall& call, const uint8_t* codes, const int64_t* places, float* out, double* squares) {
    std::memset(squares, 0, static_cast<size_t>(call.rows) * sizeof(double));
    for (int64_t first = 0; first < call.columns; first += kColumnsPerTile) {
        const int64_t group = first / (call.columns / call.groups) * call.rows;
        in_steps(call.rows, [&](int64_t row, auto is_whole) {
            constexpr bool kIsWhole = decltype(is_whole)::value;
            Floats scales[kStepVectors], minima[kStepVectors], sums[kStepVectors];
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                const int count = lanes_of_step(call.rows, row, V);
                scales[V] = load_step<kIsWhole>(call.scales + group + row + V * kLanes, count);
                minima[V] = load_step<kIsWhole>(call.minima + group + row + V * kLanes, count);
                sums[V] = zero();
            });
            for (int64_t k = first; k < first + kColumnsPerTile; ++k) {
                unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                    constexpr int V = decltype(v)::value;
                    const int count = lanes_of_step(call.rows, row, V);
                    const int64_t at = k * call.rows + row + V * kLanes;
                    const Floats value = fma(load_codes<kIsWhole>(codes + at, count), scales[V], minima[V]);
                    const Floats difference = sub(value, load_step<kIsWhole>(call.weights + at, count));
                    sums[V] = fma(difference, difference, sums[V]);
                    if (out != nullptr) {
                        store_partial(out + places[k] * call.rows + row + V * kLanes, difference, count);
                    }
                });
            }
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                add_sums(squares + row + V * kLanes, sums[V], lanes_of_step(call.rows, row, V));
            });
        });
    }
}

// Sums over groups of columns, with codes as factors.
inline void code_sums(const SumsCall& call) {
    for (int64_t group = 0; group < call.groups; ++group) {
        in_steps(call.rows, [&](int64_t row, auto is_whole) {
            constexpr bool kIsWhole = decltype(is_whole)::value;
            Floats sums[kStepVectors];
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA { sums[decltype(v)::value] = zero(); });
            for (int64_t k = group * call.width; k < (group + 1) * call.width; ++k) {
                unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                    constexpr int V = decltype(v)::value;
                    const int count = lanes_of_step(call.rows, row, V);
                    const int64_t at = k * call.rows + row + V * kLanes;
                    const Floats code = sub(load_codes<kIsWhole>(call.codes + at, count), broadcast(call.centre));
                    sums[V] = fma(load_step<kIsWhole>(call.products + at, count), code, sums[V]);
                });
            }
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                store_partial(call.sums + group * call.rows + row + V * kLanes, sums[V], lanes_of_step(call.rows, row, V));
            });
        });
    }
}

// Round some columns of GPTQ one after the other; each receives the errors of those before it.
inline void round_columns(const ColumnsCall& call) {
    const int64_t count = call.end - call.begin, width = call.columns / call.groups;
    alignas(64) float passed[kMaxRoundedColumns][kMaxRoundedColumns];  // minus the factor
    for (int64_t c = 0; c < count; ++c) {
        for (int64_t i = 0; i < c; ++i) {
            passed[c][i] = -call.factor[(call.begin + c) * call.columns + call.begin + i];
        }
    }
    in_steps(call.rows, [&](int64_t row, auto is_whole) {
        constexpr bool kIsWhole = decltype(is_whole)::value;
        alignas(64) float errors[kMaxRoundedColumns][kStepRows];
        for (int64_t c = 0; c < count; ++c) {
            const int64_t column = call.begin + c, place = call.order[column], grid = place / width * call.rows + row;
            const Floats inverse = broadcast(1.0f / call.factor[column * call.columns + column]);
            float* work = call.work + column * call.rows + row;
            Floats weights[kStepVectors];
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                weights[V] = load_step<kIsWhole>(work + V * kLanes, lanes_of_step(call.rows, row, V));
            });
            for (int64_t i = 0; i < c; ++i) {
                const Floats share = broadcast(passed[c][i]);
                unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                    constexpr int V = decltype(v)::value;
                    weights[V] = fma(share, load(errors[i] + V * kLanes), weights[V]);
                });
            }
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                const int lanes = lanes_of_step(call.rows, row, V);
                const int64_t at = grid + V * kLanes;
                const Floats minimum = load_step<kIsWhole>(call.minima + at, lanes);
                const Floats divided = load_step<kIsWhole>(call.inverses + at, lanes);
                const Floats largest = load_codes<kIsWhole>(call.largest + row + V * kLanes, lanes);
                const Floats code = rounded_code(mul(sub(weights[V], minimum), divided), largest);
                const Floats value = fma(code, load_step<kIsWhole>(call.scales + at, lanes), minimum);
                const Floats error = mul(sub(weights[V], value), inverse);
                store(errors[c] + V * kLanes, error);
                store_partial(work + V * kLanes, error, lanes);
                store_codes(call.codes + place * call.rows + row + V * kLanes, code, lanes);
            });
        }
        unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
            constexpr int V = decltype(v)::value;
            Floats sum = zero();
            for (int64_t c = 0; c < count; ++c) {
                const Floats error = load(errors[c] + V * kLanes);
                sum = fma(error, error, sum);
            }
            add_sums(call.squares + row + V * kLanes, sum, lanes_of_step(call.rows, row, V));
        });
    });
}

// out = S x for symmetric S, of which only entries on and above the diagonal are read.
inline void multiply_systems(const SystemsCall& call, const float* x, float* out) {
    std::memset(out, 0, static_cast<size_t>(call.size * call.count) * sizeof(float));
    in_steps(call.count, [&](int64_t at, auto is_whole) {
        constexpr bool kIsWhole = decltype(is_whole)::value;
        for (int64_t i = 0; i < call.size; ++i) {
            Floats own[kStepVectors], sums[kStepVectors];
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                const int64_t place = i * call.count + at + V * kLanes;
                own[V] = load_step<kIsWhole>(x + place, lanes_of_step(call.count, at, V));
                sums[V] = load_step<kIsWhole>(out + place, lanes_of_step(call.count, at, V));
            });
            for (int64_t j = i; j < call.size; ++j) {
                unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                    constexpr int V = decltype(v)::value;
                    const int count = lanes_of_step(call.count, at, V);
                    const int64_t place = j * call.count + at + V * kLanes;
                    const Floats entry = load_step<kIsWhole>(call.systems + i * call.size * call.count + place, count);
                    sums[V] = fma(entry, load_step<kIsWhole>(x + place, count), sums[V]);
                    if (j > i) {
                        store_partial(out + place, fma(entry, own[V], load_step<kIsWhole>(out + place, count)), count);
                    }
                });
            }
            unroll<kStepVectors>([&](auto v) MOEC_INLINE_LAMBDA {
                constexpr int V = decltype(v)::value;
                store_partial(out + i * call.count + at + V * kLanes, sums[V], lanes_of_step(call.count, at, V));
            });
        }
    });
}

// Solve (S + diagonal) x = right by S = L D L^T, without pivoting. S is positive semidefinite, so it needs none.
inline void solve_systems(const SystemsCall& call, const float* diagonal, float* right, float* scratch) {
    constexpr int kRows = 8;
    const int64_t size = call.size;
    const auto entry = [&](float* base, int64_t i, int64_t j) { return base + (i * size + j) * kLanes; };
    float *lower = scratch, *scaled = scratch + size * size * kLanes;  // L, and L D
    for (int64_t at = 0; at < call.count; at += kLanes) {
        const int count = lanes_left<kLanes>(call.count, at);
        for (int64_t j = 0; j < size; ++j) {
            for (int64_t first = j; first < size; first += kRows) {
                Floats sums[kRows];
                unroll<kRows>([&](auto v) MOEC_INLINE_LAMBDA {
                    const int64_t i = first + decltype(v)::value;
                    sums[decltype(v)::value] =
                        i < size ? load_partial(call.systems + (j * size + i) * call.count + at, count) : zero();
                });
                const float* rows[kRows];
                unroll<kRows>([&](auto v) MOEC_INLINE_LAMBDA {
                    const int64_t i = first + decltype(v)::value;
                    rows[decltype(v)::value] = entry(lower, i < size ? i : j, 0);
                });
                for (int64_t k = 0; k < j; ++k) {
                    const Floats own = sub(zero(), load(entry(scaled, j, k)));
                    unroll<kRows>([&](auto v) MOEC_INLINE_LAMBDA {
                        constexpr int V = decltype(v)::value;
                        sums[V] = fma(own, load(rows[V] + k * kLanes), sums[V]);
                    });
                }
                unroll<kRows>([&](auto v) MOEC_INLINE_LAMBDA {
                    const int64_t i = first + decltype(v)::value;
                    if (i == j) {
                        const Floats raised = load_partial(diagonal + j * call.count + at, count);
                        store(entry(scaled, j, j), add(sums[decltype(v)::value], raised));
                    } else if (i < size) {
                        store(entry(scaled, i, j), sums[decltype(v)::value]);
                        store(entry(lower, i, j), div(sums[decltype(v)::value], load(entry(scaled, j, j))));
                    }
                });
            }
        }
        for (int64_t i = 0; i < size; ++i) {
            Floats sum = load_partial(right + i * call.count + at, count);
            for (int64_t k = 0; k < i; ++k) {
                sum = fma(sub(zero(), load(entry(lower, i, k))), load_partial(right + k * call.count + at, count), sum);
            }
            store_partial(right + i * call.count + at, sum, count);
        }
        for (int64_t i = size; i-- > 0;) {
            Floats sum = div(load_partial(right + i * call.count + at, count), load(entry(scaled, i, i)));
            for (int64_t k = i + 1; k < size; ++k) {
                sum = fma(sub(zero(), load(entry(lower, k, i))), load_partial(right + k * call.count + at, count), sum);
            }
            store_partial(right + i * call.count + at, sum, count);
        }
    }
}
