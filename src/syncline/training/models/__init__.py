"""The models of the papers, one a file; :mod:`syncline.training.models.table` lists them by name."""
