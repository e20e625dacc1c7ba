"""Push: put bundles on a store, and name them in a channel."""
