"""The pdgate scheduler process."""
