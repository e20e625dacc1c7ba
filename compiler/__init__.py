"""Checkpoint to bundle: calibrate, measure sensitivity, search, quantize, emit, certify. Heavy; runs on a workstation."""
