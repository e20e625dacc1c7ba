"""Choose the experts to read ahead."""
