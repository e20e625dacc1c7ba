"""Device profiles: what a device has, measured or cited, and what follows from it. Standard library only."""
