"""The folder of a device: installed bundles, the current one, and what the device remembers about channels."""
