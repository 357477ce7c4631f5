"""Readers and writers of other tools' traces, one format a file."""
