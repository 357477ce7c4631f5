"""A ``torch.distributed`` backend over the native groups."""
