"""Benchmarks on a GPU: `python -m perf CASE`; tables and plots are made of their rows."""
