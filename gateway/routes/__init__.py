"""HTTP route handlers, one file per group of endpoints."""
