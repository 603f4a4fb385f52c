"""The pdgate command line and the one-machine stack."""
