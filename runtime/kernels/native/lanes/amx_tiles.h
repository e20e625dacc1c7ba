// The tile registers of AMX. This file has no include guard: kernels_amx.cpp includes it inside its own namespace.
//
// The instructions are written as inline assembly. The intrinsics of GCC 12 do not name the memory that they read;
// for the configuration they name only its first bytes. The compiler then drops the values stored there.

// The 64 bytes that LDTILECFG reads.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, Tile Configuration.
struct TileShapes {
    alignas(64) uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int row_count, int bytes) {
        row_bytes[tile] = static_cast<uint16_t>(bytes);
        rows[tile] = static_cast<uint8_t>(row_count);
    }
};
static_assert(sizeof(TileShapes) == 64, "LDTILECFG reads 64 bytes");

inline void configure_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void keep_tile_shapes(TileShapes* shapes) { __asm__ volatile("sttilecfg %0" : "=m"(*shapes)); }
inline void release_tiles() { __asm__ volatile("tilerelease"); }

template <int Tile>
MOEC_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile)); }

template <int Tile>
MOEC_INLINE void tile_load(const void* rows, int64_t distance) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(distance), "i"(Tile) : "memory");
}

template <int Tile>
MOEC_INLINE void tile_store(void* rows, int64_t distance) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(distance), "i"(Tile) : "memory");
}

// Sums += Rows (signed bytes) times Columns (bytes, signed or unsigned).
template <int Sums, int Rows, int Columns, bool IsSigned>
MOEC_INLINE void tile_multiply() {
    if constexpr (IsSigned) {
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
    } else {
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
    }
}

// Sums (floats) += Rows times Columns, both pairs of bfloat16.
template <int Sums, int Rows, int Columns>
MOEC_INLINE void tile_multiply_bfloats() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
}
