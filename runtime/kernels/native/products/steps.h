// Sizes of one step of a product for eight lanes and 16 registers. This file has no include guard: it is included inside the
// namespace of an instruction set, before products/linear.h.

constexpr int kPairedBlocks = 2;   // row blocks of a 16-bit matrix, for one token: four chains of fma hide its latency
constexpr int kFloatTokens = 6;    // tokens, with a 16-bit matrix
constexpr int kPanelBlocks = 1;    // row blocks of a quantized matrix, for several tokens
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 4;  // tokens, with a quantized matrix
constexpr int kWeighedSums = 8;    // vectors of sums, of several queries, while attention weighs values
constexpr int kSystemVectors = 2;  // vectors of rows, in the systems of a quantizer
constexpr int kSystemColumns = 4;  // columns, likewise
constexpr bool multiplies_packed(int) { return false; }  // codes are unpacked to bytes before they are multiplied
