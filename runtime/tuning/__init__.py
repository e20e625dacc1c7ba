"""Files that are kept next to a bundle: tuned options, and what lossy modes cost."""
