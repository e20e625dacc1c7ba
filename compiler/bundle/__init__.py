"""Write a bundle and certify it."""
