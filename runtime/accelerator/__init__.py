"""CPU and accelerator together: which of a layer's experts run where, and the devices that run them. Off by default.

Only `torch_device.py` and `torch_weights.py` know torch, and only `opening.py` loads them.
"""
