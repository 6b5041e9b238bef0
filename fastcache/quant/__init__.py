"""Stored number formats to float32. Imports numpy and ml_dtypes only."""
