"""Tests of the report; a package, so that test files may share names with others."""
