"""Faults under load: see `python -m benches.chaos --help` and docs/chaos.md."""
