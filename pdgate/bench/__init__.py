"""`pdgate bench`: load against any OpenAI-compatible endpoint, and whether two runs really differ."""
