"""Exchanges the messages of plans that DDP's reducer cannot run by itself."""
