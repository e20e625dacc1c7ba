// One step of a product: some panels times some rows of activations. This file has no include guard: it is included inside the
// namespace of an instruction set, after the header of its panels.

// Memory that will be read next.
struct NextBytes {
    const uint8_t *begin, *end;
};

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
