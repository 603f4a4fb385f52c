"""Fuzzing of what strangers' bytes reach first: `make fuzz`."""
