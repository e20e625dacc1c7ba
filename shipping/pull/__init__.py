"""From a store to a device: choose a bundle, find out which bytes are missing, fetch them, check them."""
