// What one step of a product takes where tiles multiply sixteen rows with sixteen tokens. Included inside a namespace of its own,
// before products/linear.h; no include guard, for that reason.

constexpr int kPairedBlocks = 2;    // blocks of a 16-bit matrix, over one token
constexpr int kFloatTokens = 12;    // tokens, with a 16-bit matrix: as many chains of fma
constexpr int kPanelBlocks = 1;     // blocks of a quantized matrix, over several tokens
constexpr int kBytePanelColumns = 512;
constexpr int kRoundedTokens = 16;  // and those tokens: their sums are half of the registers
constexpr bool multiplies_packed(int) { return false; }  // codes are brought to bytes before they are multiplied
