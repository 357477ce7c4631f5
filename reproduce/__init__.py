"""The figures and tables of the papers, made again where that needs no cluster."""
