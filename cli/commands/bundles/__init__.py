"""Commands that show, check and pack a bundle."""
