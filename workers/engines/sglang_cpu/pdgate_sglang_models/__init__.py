"""The model classes that SGLang imports at start; any other architecture makes it import all of its own."""
