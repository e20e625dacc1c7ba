"""Speed of whole runs: options in turns, and start-up."""
