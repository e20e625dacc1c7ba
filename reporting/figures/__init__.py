"""The figures of the page. Each file makes one section."""
