"""One HTML page that shows a bundle: what was promised, how it was shown, and what a memory budget does to it.

`report.py` makes the page. The command line hands it what a replayed trace says.
"""
