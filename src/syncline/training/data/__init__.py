"""The data sets, one a file; :mod:`syncline.training.data.table` lists them by name."""
