"""The yardstick: a checkpoint of OLMoE-1B-7B's shape with random weights whose routing resembles a trained model's."""
