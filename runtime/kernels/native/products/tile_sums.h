// Sums of products of a tile's codes with activations rounded to 8 bits, written once over eight or sixteen lanes. `quad_of`
// unpacks the codes of each format; `add_products` of the instruction set multiplies them. This file has no include guard: each
// targets/kernels_*.cpp includes it inside its own namespace, after products/linear.h.

constexpr int kQuadsPerTile = kColumnsPerTile / kColumnsPerLane;

// Codes of kLanes rows in columns 4 Quad to 4 Quad + 3 of a tile, one byte each.
// Vector: which of the row block's kVectorsPerBlock vectors.
template <int Bitwidth, int Quad, int Vector>
MOEC_INLINE Ints quad_of(const uint8_t* tile) {
    constexpr uint32_t kEveryByte = 0x01010101u;
    const uint8_t* lanes = tile + Vector * (kPlaneBytes / kVectorsPerBlock);
    if constexpr (Bitwidth == kMxfp4) {
        return look_up(kMxfp4Levels, quad_of<4, Quad, Vector>(tile));
    } else if constexpr (Bitwidth == kTernary) {
        return ternary_quad<Quad, Vector>(tile);
    } else if constexpr (Bitwidth == 8) {
        return load_lanes(lanes + Quad * kPlaneBytes);
    } else if constexpr (Bitwidth == 3) {
        const Ints plane = load_lanes(lanes + 2 * kPlaneBytes);
        constexpr int kShift = Quad - 2;  // moves the high bit to bit 2
        if constexpr (kShift >= 0) {
            return either(quad_of<2, Quad, Vector>(tile), mask(shift_right<kShift>(plane), 4 * kEveryByte));
        } else {
            return either(quad_of<2, Quad, Vector>(tile), mask(shift_left<-kShift>(plane), 4 * kEveryByte));
        }
    } else {
        constexpr int kQuadsPerPlane = 8 / Bitwidth;
        constexpr uint32_t kMask = ((1u << Bitwidth) - 1) * kEveryByte;
        return mask(shift_right<Bitwidth * (Quad % kQuadsPerPlane)>(load_lanes(lanes + Quad / kQuadsPerPlane * kPlaneBytes)),
                    kMask);
    }
}

// Per row, the sum over a tile of code * q.
// narrow: `Products` may have 16 bits. They hold a whole tile of codes up to 15, but only half a tile of levels up to 24.
// second_half: the other half of a tile of such levels.
// wide: for codes of 8 bits. kByteCentre is subtracted from them if the instruction set cannot multiply all of them.
template <int Bitwidth>
struct TileSum {
    Products narrow, second_half;
    Ints wide;
};

// centre * sum q: the part of a tile's dot product that comes from the centre of the codes. total: sum q.
template <int Bitwidth>
MOEC_INLINE Ints centre_product(Floats total) {
    constexpr int kCentre = centre_of(Bitwidth), kLeft = Bitwidth == 8 ? kCentre - kByteCentre : kCentre;
    constexpr int kShift = kLeft == 128 ? 7 : kLeft == 8 ? 3 : kLeft == 4 ? 2 : kLeft == 2 ? 1 : 0;
    static_assert(kLeft == 0 || kLeft == 1 << kShift, "centres are powers of two");
    return kLeft == 0 ? broadcast_int(0) : shift_left<kShift>(to_int(total));
}

// Sums of 32 bits begin with the negative centre product, so that nothing has to be subtracted at the end.
template <int Bitwidth, bool IsSymmetric>
MOEC_INLINE TileSum<Bitwidth> first_sum(Floats total) {
    if constexpr (Bitwidth == 8) {
        return {Products{}, Products{}, IsSymmetric ? sub_int(broadcast_int(0), centre_product<8>(total)) : broadcast_int(0)};
    } else if constexpr (IsSymmetric && kHasWideProducts) {
        return {sub_int(broadcast_int(0), centre_product<Bitwidth>(total)), no_products(), Ints{}};
    } else {
        return {no_products(), no_products(), Ints{}};
    }
}

template <int Bitwidth, int Quad>
MOEC_INLINE void add_quad(TileSum<Bitwidth>& sum, Ints codes, Ints x) {
    if constexpr (Bitwidth == 8) {
        sum.wide = add_byte_products(sum.wide, codes, x);
    } else if constexpr (Bitwidth == kMxfp4 && !kHasWideProducts && Quad >= kQuadsPerTile / 2) {
        sum.second_half = add_products(sum.second_half, codes, x);
    } else {
        sum.narrow = add_products(sum.narrow, codes, x);
    }
}

// Three-valued formats without unpacking. Code c is the first digit of a fraction x of 256, and y is the fraction that is left
// for the digits after it: 3 x = 256 c + y. So sum c q = (3 sum x q - sum y q) / 256. Two products replace one product and the
// comparisons that make a digit. The magnitude is at most 8 x 4 x 255 x 127 x 3.
struct FractionSums {
    Products fractions, rests;
};

MOEC_INLINE FractionSums no_fractions() {
    return {no_products(), no_products()};
}

// The bytes of a plane without their first `Digits` digits.
template <int Plane, int Digits, int Vector>
MOEC_INLINE Ints fractions_behind(const uint8_t* tile) {
    Ints fractions = load_lanes(tile + Plane * kPlaneBytes + Vector * (kPlaneBytes / kVectorsPerBlock));
    unroll<Digits>([&](auto) MOEC_INLINE_LAMBDA { fractions = without_digits(fractions); });
    return fractions;
}

// Add the products of one quad of a tile's codes, read from memory.
// Quad: its number within the 32 columns that are summed. QuadOfTile: its number within the tile.
template <int Bitwidth, int Quad, int QuadOfTile, int Vector>
MOEC_INLINE void add_codes(TileSum<Bitwidth>& sum, FractionSums& sums, const uint8_t* tile, Ints x) {
    constexpr int kPlane = QuadOfTile / kTernaryDigits, kDigit = QuadOfTile % kTernaryDigits;
    if constexpr (kMultipliesFractions && Bitwidth == kTernary && kPlane < kTernaryPlanes) {
        sums.fractions = add_products(sums.fractions, fractions_behind<kPlane, kDigit, Vector>(tile), x);
        sums.rests = add_products(sums.rests, fractions_behind<kPlane, kDigit + 1, Vector>(tile), x);
    } else {
        add_quad<Bitwidth, Quad>(sum, quad_of<Bitwidth, QuadOfTile, Vector>(tile), x);
    }
}

template <int Bitwidth>
MOEC_INLINE void add_fractions(TileSum<Bitwidth>& sum, const FractionSums& sums) {
    if constexpr (kMultipliesFractions && Bitwidth == kTernary) {
        const Ints once = sum_products(sums.fractions), thrice = add_int(once, add_int(once, once));
        sum.narrow = add_int(sum.narrow, shift_right_signed<8>(sub_int(thrice, sum_products(sums.rests))));
    }
}

// The dot product as floats, exact; in symmetric formats that of code - centre. total: sum of q over the tile.
template <int Bitwidth, bool IsSymmetric>
MOEC_INLINE Floats dot_of(const TileSum<Bitwidth>& sum, Floats total) {
    if constexpr (Bitwidth == 8) {
        const Floats dot = to_float(sum.wide);
        return IsSymmetric || kByteCentre == 0 ? dot : fma(broadcast(static_cast<float>(kByteCentre)), total, dot);
    } else if constexpr (Bitwidth == kMxfp4 && !kHasWideProducts) {
        return to_float(add_int(sum_products(sum.narrow), sum_products(sum.second_half)));
    } else if constexpr (IsSymmetric && !kHasWideProducts) {
        return to_float(sub_int(sum_products(sum.narrow), centre_product<Bitwidth>(total)));
    } else {
        return to_float(sum_products(sum.narrow));
    }
}

template <int Bitwidth, bool IsSymmetric>
MOEC_INLINE Floats add_tile(Floats acc, Floats step, Floats scale, Floats minimum, const TileSum<Bitwidth>& sum, Floats total) {
    const Floats dot = dot_of<Bitwidth, IsSymmetric>(sum, total);
    return fma(step, IsSymmetric ? mul(scale, dot) : fma(scale, dot, mul(minimum, total)), acc);
}
