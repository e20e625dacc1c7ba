// Sizes of one step of a product for the scalar kernels. This file has no include guard: kernels_scalar.cpp includes it inside
// its namespace, before products/linear.h.
//
// One token at a time: without vector registers, several tokens gain 2 % and take 1.6 times the code.

constexpr int kPairedBlocks = 2;   // row blocks of a 16-bit matrix, for one token
constexpr int kFloatTokens = 1;    // tokens, with a 16-bit matrix
constexpr int kPanelBlocks = 1;    // row blocks of a quantized matrix, for several tokens
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 1;  // tokens, with a quantized matrix
constexpr int kWeighedSums = 8;    // vectors of sums, of several queries, while attention weighs values
constexpr bool multiplies_packed(int) { return false; }  // codes are unpacked to bytes before they are multiplied
