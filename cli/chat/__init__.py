"""A conversation in the terminal: what is read, what the model gets, and the commands between the messages."""
