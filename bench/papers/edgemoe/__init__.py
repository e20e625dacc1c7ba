"""EdgeMoE: sensitivity, paths, caches, time per token."""
