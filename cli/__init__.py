"""The command line: the only room that prints, reads the environment, and wires compiler to runtime."""
