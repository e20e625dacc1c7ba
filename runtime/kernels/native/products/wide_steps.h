// Sizes of one step of a product for sixteen lanes and 32 registers. This file has no include guard: it is included inside the
// namespace `wide`, before products/linear.h.

constexpr int kPairedBlocks = 2;    // row blocks of a 16-bit matrix, for one token
constexpr int kFloatTokens = 12;    // tokens, with a 16-bit matrix: as many chains of fma
constexpr int kPanelBlocks = 2;     // row blocks of a quantized matrix, for several tokens; loaded bytes of inputs serve both
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 8;   // tokens, with a quantized matrix: half of the rows that stand side by side
// Whether codes are unpacked to bytes during the product, by execution units that the products leave idle.
constexpr bool multiplies_packed(int bitwidth) { return bitwidth != kTernary; }
constexpr int kWeighedSums = 16;    // vectors of sums, of several queries, while attention weighs values
