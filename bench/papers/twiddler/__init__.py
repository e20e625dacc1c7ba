"""Twiddler: popularity and placement of experts."""
