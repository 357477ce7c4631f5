"""Collectives measured beside those of others, in turns."""
