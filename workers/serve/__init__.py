"""``tokenmill serve``: an HTTP doorway that speaks the OpenAI API, so that existing clients work unchanged.

It is an application of the client: every request becomes jobs of the fleet, and nothing is generated in here. Needs
the extra ``serve`` (Starlette and Uvicorn); imports neither torch nor Celery.
"""
