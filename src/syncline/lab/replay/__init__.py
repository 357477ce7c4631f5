"""Profiles replayed: real gradients and a real network, with computation emulated by waiting."""
