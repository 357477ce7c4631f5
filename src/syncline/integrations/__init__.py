"""Adapters for training frameworks; each module imports its framework, so import it by name."""
