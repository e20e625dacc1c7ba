// What one step of a product takes where sixteen lanes have 32 registers. Included inside a namespace of its own, before
// products/linear.h; no include guard, for that reason.

constexpr int kPairedBlocks = 2;    // blocks of a 16-bit matrix, over one token
constexpr int kFloatTokens = 12;    // tokens, with a 16-bit matrix: as many chains of fma
constexpr int kPanelBlocks = 2;     // blocks of a quantized matrix, over several tokens, whose bytes are loaded once for both
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 8;   // and those tokens: half of those that stand side by side
// Codes that are brought to bytes while they are multiplied, by what the products leave idle, and not once before.
constexpr bool multiplies_packed(int bitwidth) { return bitwidth != kTernary; }
constexpr int kWeighedSums = 16;    // vectors of sums of several queries while values are weighed
