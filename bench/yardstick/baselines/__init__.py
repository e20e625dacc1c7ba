"""moec next to simpler versions of itself."""
