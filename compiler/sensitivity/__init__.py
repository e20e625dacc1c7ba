"""The quality cost of a format: predicted and measured."""
