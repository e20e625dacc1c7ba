"""The parts of a layer."""
