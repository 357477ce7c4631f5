"""Collectives measured beside those of others, interleaved."""
