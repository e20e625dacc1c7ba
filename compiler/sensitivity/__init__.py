"""What a format costs in quality: predicted, and measured."""
