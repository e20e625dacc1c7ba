"""The layers of a model, one loaded at a time, and what stays in memory between passes.

residency: how many layers stay, and how many texts pass. memory: bytes, known before the work.
slot: the loaded layer. texts: texts between two layers. output_head: from the last layer to logits.
Calibration, quantization, prices and trials are passes over these layers.
"""
