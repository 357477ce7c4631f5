"""Benchmarks of collectives, interleaved with those of other libraries."""
