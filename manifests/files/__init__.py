"""Read and write files: what strangers made within bounds, what moec makes atomically."""
