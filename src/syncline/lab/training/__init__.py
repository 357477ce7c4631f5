"""Reference training: models, data and the loop behind ``syncline train``."""
