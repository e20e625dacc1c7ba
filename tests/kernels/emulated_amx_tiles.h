// An emulation of lanes/amx_tiles.h in memory, for processors without AMX. It defines the same names and is included instead.
// No include guard, because it is included inside a namespace.

struct TileShapes {
    int row_bytes[8] = {}, rows[8] = {};

    void set(int tile, int row_count, int bytes) {
        row_bytes[tile] = bytes;
        rows[tile] = row_count;
    }
};

struct TileFile {
    TileShapes shapes;
    bool is_configured = false;
    uint8_t bytes[8][16][64] = {};
};
thread_local TileFile tile_file;

// The emulation ends the program where the processor would raise an error.
inline void require_tiles(bool holds) {
    if (!holds) {
        __builtin_trap();
    }
}

inline void configure_tiles(const TileShapes& shapes) {
    tile_file = TileFile{};
    tile_file.shapes = shapes;
    tile_file.is_configured = true;
}
inline void keep_tile_shapes(TileShapes* shapes) { *shapes = tile_file.is_configured ? tile_file.shapes : TileShapes{}; }
inline void release_tiles() { tile_file = TileFile{}; }

inline void require_shape(int tile) {
    require_tiles(tile_file.is_configured && tile_file.shapes.rows[tile] > 0 && tile_file.shapes.row_bytes[tile] > 0);
}

template <int Tile>
inline void tile_zero() {
    require_shape(Tile);
    std::memset(tile_file.bytes[Tile], 0, sizeof tile_file.bytes[Tile]);
}

template <int Tile>
inline void tile_load(const void* rows, int64_t distance) {
    require_shape(Tile);
    std::memset(tile_file.bytes[Tile], 0, sizeof tile_file.bytes[Tile]);
    for (int row = 0; row < tile_file.shapes.rows[Tile]; ++row) {
        std::memcpy(tile_file.bytes[Tile][row], static_cast<const uint8_t*>(rows) + row * distance,
                    static_cast<size_t>(tile_file.shapes.row_bytes[Tile]));
    }
}

template <int Tile>
inline void tile_store(void* rows, int64_t distance) {
    require_shape(Tile);
    for (int row = 0; row < tile_file.shapes.rows[Tile]; ++row) {
        std::memcpy(static_cast<uint8_t*>(rows) + row * distance, tile_file.bytes[Tile][row],
                    static_cast<size_t>(tile_file.shapes.row_bytes[Tile]));
    }
}

template <int Sums, int Rows, int Columns, bool IsSigned>
inline void tile_multiply() {
    const TileShapes& shapes = tile_file.shapes;
    require_tiles(shapes.rows[Sums] == shapes.rows[Rows] && shapes.row_bytes[Sums] == shapes.row_bytes[Columns] &&
                  shapes.row_bytes[Rows] == 4 * shapes.rows[Columns]);
    for (int m = 0; m < shapes.rows[Sums]; ++m) {
        for (int n = 0; n < shapes.row_bytes[Sums] / 4; ++n) {
            int32_t sum;
            std::memcpy(&sum, &tile_file.bytes[Sums][m][4 * n], sizeof sum);
            for (int k = 0; k < shapes.row_bytes[Rows]; ++k) {
                const uint8_t column = tile_file.bytes[Columns][k / 4][4 * n + k % 4];
                sum +=
                    static_cast<int8_t>(tile_file.bytes[Rows][m][k]) * (IsSigned ? static_cast<int8_t>(column) : int{column});
            }
            std::memcpy(&tile_file.bytes[Sums][m][4 * n], &sum, sizeof sum);
        }
    }
}

#if defined(MOEC_EMULATE_BFLOATS)
// Even and odd columns are summed apart, from zero; then their sum is added.
template <int Sums, int Rows, int Columns>
inline void tile_multiply_bfloats() {
    const TileShapes& shapes = tile_file.shapes;
    require_tiles(shapes.rows[Sums] == shapes.rows[Rows] && shapes.row_bytes[Sums] == shapes.row_bytes[Columns] &&
                  shapes.row_bytes[Rows] == 4 * shapes.rows[Columns]);
    for (int m = 0; m < shapes.rows[Sums]; ++m) {
        for (int n = 0; n < shapes.row_bytes[Sums] / 4; ++n) {
            float halves[2] = {}, sum;
            for (int k = 0; k < shapes.row_bytes[Rows] / 2; ++k) {
                uint16_t row, column;
                std::memcpy(&row, &tile_file.bytes[Rows][m][2 * k], sizeof row);
                std::memcpy(&column, &tile_file.bytes[Columns][k / 2][4 * n + 2 * (k % 2)], sizeof column);
                halves[k % 2] = fma_flushed(row, column, halves[k % 2]);
            }
            std::memcpy(&sum, &tile_file.bytes[Sums][m][4 * n], sizeof sum);
            sum = float_flushed(double{sum} + double{float_flushed(double{halves[0]} + double{halves[1]})});
            std::memcpy(&tile_file.bytes[Sums][m][4 * n], &sum, sizeof sum);
        }
    }
}
#endif
