"""Keep experts in memory, and choose the ones to evict."""
