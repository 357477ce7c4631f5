"""Measuring: a training iteration and the network."""
