"""What is on disk: the files of a bundle, and bundles packed into one file."""
