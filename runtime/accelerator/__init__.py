"""CPU and accelerator at the same time: where each expert of a layer runs, and the devices.

It is off by default: `engine/open_engine.py` loads these files only if the options name an accelerator.
`open_device.py` imports torch when it opens a device. Of the other files `image.py`, those named `torch_*.py`, and
`grouped/` do.
"""
