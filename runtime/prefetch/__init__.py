"""Which experts to read ahead."""
