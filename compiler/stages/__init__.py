"""The stages of a compile, each a function from values to a value that no later stage changes."""
