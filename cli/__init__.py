"""The command line: the only package that prints, reads the environment, and connects compiler and runtime."""
