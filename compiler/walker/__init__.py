"""Compiling a model that does not fit in memory: one decoder layer at a time, from the first to the last.

slot.py runs texts through one layer after the other; units.py quantizes the experts of the loaded layer and says what
each format costs at its output; store.py keeps both on disk; sweep.py does it for every layer and goes on where a
killed run stopped; trials.py measures a finished plan the same way; memory.py says beforehand what it takes.
"""
