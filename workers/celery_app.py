"""The application for Celery's own tools: ``celery -A workers.celery_app inspect stats``, Flower, ``worker``."""

from __future__ import annotations

from workers.app import make_app
from workers.settings import load_settings

app = make_app(load_settings())
