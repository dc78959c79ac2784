"""Celery side of Tokenmill: app, tasks, pool, delivery, client and command line."""
