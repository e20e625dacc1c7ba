"""The third example: SmolLM2-135M-Instruct, split into experts that are trained by distillation."""
