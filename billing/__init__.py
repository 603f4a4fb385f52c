"""The pdgate billing process."""
