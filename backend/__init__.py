"""Ways to generate text: the asynchronous engine and the other backends. No Celery and no SQL in here."""
