"""Readers of other tools' traces, and reports."""
