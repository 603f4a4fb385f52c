"""Benchmarks. `python -m benches` measures the budget of CPU and latency on this machine."""
