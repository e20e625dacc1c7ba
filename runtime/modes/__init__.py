"""Lossy modes. Each is off unless the user names it. All decide from the logical cache, so that runs are repeatable."""
