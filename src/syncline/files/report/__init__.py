"""Reports for people and for machines: the page, the tables, the trace. No torch."""
