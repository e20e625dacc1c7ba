"""moec next to llama.cpp and its fork ik_llama.cpp."""
