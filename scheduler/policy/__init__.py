"""Policy: snapshot in, decision and reason out. Pure."""
