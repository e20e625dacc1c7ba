"""The yardstick: a checkpoint of OLMoE-1B-7B's shape. Its weights are random, its routing is like a trained model's."""
