"""Fast synchronous data-parallel training on the network you have."""
