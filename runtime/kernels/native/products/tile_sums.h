// Sums of products of a tile's codes with activations rounded to 8 bits, written once over eight or sixteen lanes. `quad_of`
// unpacks the codes of each format; `add_products` of the instruction set multiplies them. This file has no include guard: each
// targets/kernels_*.cpp includes it inside its own namespace, after products/linear.h.

constexpr int kQuadsPerTile = kColumnsPerTile / kColumnsPerLane;
constexpr bool kHasWideProducts = kProductsPerSum == 0;

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
    } else if constexpr (low_bits_of(Bitwidth) != Bitwidth) {
        using High = HighBits<Bitwidth, Quad>;
        const Ints plane = load_lanes(lanes + High::kPlane * kPlaneBytes);
        return either(quad_of<High::kLow, Quad, Vector>(tile), mask(shift_either<High::kShift>(plane), High::kMask * kEveryByte));
    } else {
        constexpr int kQuadsPerPlane = 8 / Bitwidth;
        constexpr uint32_t kMask = ((1u << Bitwidth) - 1) * kEveryByte;
        return mask(shift_right<Bitwidth * (Quad % kQuadsPerPlane)>(load_lanes(lanes + Quad / kQuadsPerPlane * kPlaneBytes)),
                    kMask);
    }
}

// Quads of a tile whose products `Products` can hold. If they have 16 bits, that depends on the largest code (or level).
template <int Bitwidth>
constexpr int quads_per_sum() {
    constexpr int kLargest = Bitwidth == kMxfp4 ? 2 * kMxfp4Centre : Bitwidth == kTernary ? 2 : (1 << Bitwidth) - 1;
    constexpr int kMost = INT16_MAX / (127 * kLargest * (kHasWideProducts ? 1 : kProductsPerSum));
    return kHasWideProducts || kMost >= kQuadsPerTile ? kQuadsPerTile : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
}

// Whether a tile takes more than one sum of products.
template <int Bitwidth>
constexpr bool kSplitsTile = Bitwidth != 8 && quads_per_sum<Bitwidth>() < kQuadsPerTile;

// Per row, the sum over a tile of code * q.
// narrow: over the tile, or over the last quads_per_sum quads. The sums before it are in `wide`.
// wide: also for codes of 8 bits. kByteCentre is subtracted from them if the instruction set cannot multiply all of them.
template <int Bitwidth>
struct TileSum {
    Products narrow;
    Ints wide;
};

// centre * sum q: the part of a tile's dot product that comes from the centre of the codes. total: sum q.
template <int Bitwidth>
MOEC_INLINE Ints centre_product(Floats total) {
    constexpr int kCentre = centre_of(Bitwidth), kLeft = Bitwidth == 8 ? kCentre - kByteCentre : kCentre;
    constexpr int kShift = kLeft == 1 || kLeft == 0 ? 0 : Bitwidth - 1;
    static_assert(kLeft == 0 || kLeft == 1 << kShift, "centres are powers of two");
    return kLeft == 0 ? broadcast_int(0) : shift_left<kShift>(to_int(total));
}

// Sums of 32 bits begin with the negative centre product, so that nothing has to be subtracted at the end.
template <int Bitwidth, bool IsSymmetric>
MOEC_INLINE TileSum<Bitwidth> first_sum(Floats total) {
    constexpr bool kIsWide = Bitwidth == 8 || kSplitsTile<Bitwidth>;
    if constexpr (IsSymmetric && kIsWide) {
        return {no_products(), sub_int(broadcast_int(0), centre_product<Bitwidth>(total))};
    } else if constexpr (IsSymmetric && kHasWideProducts) {
        return {sub_int(broadcast_int(0), centre_product<Bitwidth>(total)), Ints{}};
    } else {
        return {no_products(), broadcast_int(0)};
    }
}

template <int Bitwidth, int Quad>
MOEC_INLINE void add_quad(TileSum<Bitwidth>& sum, Ints codes, Ints x) {
    if constexpr (Bitwidth == 8) {
        sum.wide = add_byte_products(sum.wide, codes, x);
    } else if constexpr (kSplitsTile<Bitwidth>) {
        constexpr int kQuads = quads_per_sum<Bitwidth>();
        sum.narrow = add_products(Quad % kQuads == 0 ? no_products() : sum.narrow, codes, x);
        if constexpr (Quad % kQuads == kQuads - 1) {
            sum.wide = add_int(sum.wide, sum_products(sum.narrow));
        }
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
    } else if constexpr (kSplitsTile<Bitwidth>) {
        return to_float(sum.wide);
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

struct BytePanel;  // differs between instruction sets

// Memory that will be read next.
struct NextBytes {
    const uint8_t *begin, *end;
};

// One step of a product: some panels times some rows of activations.
// panels: [Blocks], Blocks is kPanelBlocks or 1; they hold tiles [first_tile, first_tile + tiles).
// rows, first, count: the step takes rows [first, first + count); count <= 96, first is a multiple of kRowsSideBySide.
// acc: [Blocks, count, 16], read and written.
struct PanelStep {
    const BytePanel* panels;
    int64_t first_tile, tiles;
    const RoundedRows& rows;
    int64_t first;
    int count;
    float* acc;
    const NextBytes* next;  // [Blocks]
};
