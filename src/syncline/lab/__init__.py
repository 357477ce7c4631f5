"""What exists to show and to try: ``syncline train``, emulated clusters, replays, benchmarks."""
