"""Engines behind workers.engine.Engine."""
