"""Measurements against peers. Each writes its raw data with the machine to ``results/``."""
