"""Records of a run: statistics and routing traces."""
