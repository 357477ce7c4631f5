"""The papers' models, one a file; :mod:`syncline.training.models.table` lists them by name."""
