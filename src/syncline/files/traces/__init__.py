"""Readers and writers of other tools' traces, one format per file."""
