"""Logs and metrics, declared once."""
