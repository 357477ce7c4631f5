"""Data-parallel training under a plan."""
