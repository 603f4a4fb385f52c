"""Alembic migrations of the tenancy and billing schemas."""
