"""HOBBIT: importance of experts, lookahead, dynamic loading, caches."""
