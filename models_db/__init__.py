"""SQL side of Tokenmill: typed tables, sessions, writers and queries."""
