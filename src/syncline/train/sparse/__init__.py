"""Sparse exchange that loses nothing: selection, top-k, gTop-k, residuals."""
