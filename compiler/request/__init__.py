"""What was asked of a compile, and a plan as a value."""
