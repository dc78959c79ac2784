"""SQL side of Tokenmill: typed tables, sessions, writers and queries."""

import logging

# Alembic says a line for each of its parts when it is imported, to whoever shows all that is logged.
logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)
