"""The layers of a model, one loaded at a time, and what stays in memory between passes.

memory: bytes, known before the work, how many layers stay, and how many texts pass.
loaded_layer: the layer whose weights are loaded. texts: texts between two layers.
output_head: from the last layer to logits.
Calibration, quantization, prices and trials are passes over these layers.
"""
