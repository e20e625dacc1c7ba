"""Files next to a bundle: tuned options, and the measured loss of lossy modes."""
