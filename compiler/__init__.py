"""Checkpoint to bundle: calibrate, measure sensitivity, search, quantize, emit, certify. Runs on a workstation."""
