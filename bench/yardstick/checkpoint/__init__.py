"""The checkpoint of the yardstick, the same weights for llama.cpp, and figures of its routing."""
