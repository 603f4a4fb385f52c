"""The pdgate workers process."""
