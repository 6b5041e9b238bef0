"""Compiled only: nothing here is for Python."""
