"""KL and perplexity over bytes, next to what people would use."""
