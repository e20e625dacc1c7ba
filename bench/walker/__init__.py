"""Memory and time of compiles layer by layer."""
