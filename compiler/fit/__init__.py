"""Does a model fit a machine, and how fast would it be? Answered from config.json, before a download, without torch."""
