"""Alembic environment and revisions, found by package path."""
