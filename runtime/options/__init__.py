"""What a user can set about a run, checked in one place."""
