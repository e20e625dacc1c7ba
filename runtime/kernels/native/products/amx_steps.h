// Sizes of one step of a product when AMX tiles multiply sixteen rows with sixteen tokens. This file has no include guard:
// kernels_amx.cpp includes it inside the namespace `wide`, before products/linear.h.

constexpr int kPairedBlocks = 2;    // row blocks of a 16-bit matrix, for one token
constexpr int kFloatTokens = 12;    // tokens, with a 16-bit matrix: as many chains of fma
constexpr int kPanelBlocks = 1;     // row blocks of a quantized matrix, for several tokens
constexpr int kBytePanelColumns = 512;
constexpr int kRoundedTokens = 16;  // tokens, with a quantized matrix: their sums fill half of the registers
constexpr bool multiplies_packed(int) { return false; }  // codes are unpacked to bytes before they are multiplied
