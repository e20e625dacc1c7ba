"""What text says about experts."""
