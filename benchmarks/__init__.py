"""Measurements: `python -m benchmarks.NAME [--quick]` prints a table, draws a figure and ends with one line of JSON."""
