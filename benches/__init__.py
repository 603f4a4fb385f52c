"""Benchmarks. `python -m benches` measures the budget of docs/performance.md on this machine."""
