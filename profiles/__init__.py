"""Device profiles: measured or cited properties of a device, and predictions from them. Standard library only."""
