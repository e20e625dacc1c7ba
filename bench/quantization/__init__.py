"""Losses of formats and quantizers at equal bits per weight."""
