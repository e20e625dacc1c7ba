// What is multiplied in one step of a product. Included inside the namespace of an instruction set, after its panels; no include
// guard, for that reason.

// Memory that will be read next.
struct NextBytes {
    const uint8_t *begin, *end;
};

// Blocks (kPanelBlocks or 1) panels, of tiles from first_tile on, and `count` <= 96 of the rows, from `first` on, a multiple of
// kRowsSideBySide, that they are multiplied with. acc: [Blocks, count, 16], read and written.
struct PanelStep {
    const BytePanel* panels;
    int64_t first_tile, tiles;
    const RoundedRows& rows;
    int64_t first;
    int count;
    float* acc;
    const NextBytes* next;  // [Blocks]
};
