"""Collectives as programs, ranks that run them, and the backend of ``torch.distributed``."""
