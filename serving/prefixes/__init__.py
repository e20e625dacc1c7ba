"""Keys and values of the beginnings of conversations, in files."""
