"""Demonstrations and experiments: ``syncline train``, emulated clusters, replays, benchmarks."""
