"""Which experts are in memory, and which one makes room for the next."""
