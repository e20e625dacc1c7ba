// What one step of a product takes where eight lanes have 16 registers. Included inside the namespace of an instruction set,
// before products/linear.h; no include guard, for that reason.

constexpr int kPairedBlocks = 2;   // blocks of a 16-bit matrix, over one token: 32 rows are four chains, which hide the latency of fma
constexpr int kFloatTokens = 6;    // tokens, with a 16-bit matrix
constexpr int kPanelBlocks = 1;    // blocks of a quantized matrix, over several tokens
constexpr int kBytePanelColumns = 256;
constexpr int kRoundedTokens = 4;  // and those tokens
constexpr int kWeighedSums = 8;    // vectors of sums of several queries while values are weighed
constexpr bool multiplies_packed(int) { return false; }  // codes are brought to bytes before they are multiplied
