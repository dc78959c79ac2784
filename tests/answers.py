"""The answers in docs/queries.md: each query's result on the sample history, as a table under it.

``python -m tests.answers`` writes them anew, asked of SQLite; the tests ask all three databases.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from models_db.migrate import upgrade
from models_db.sample_history import load
from models_db.session import make_engine

PAGE = Path(__file__).resolve().parents[1] / "docs" / "queries.md"
_QUESTION = re.compile(
    r"^## (\d+)\. (.*?)\n(.*?)^```sql\n(.*?)^```\n\n((?:\|[^\n]*\n)*)", re.DOTALL | re.MULTILINE
)


def questions() -> Iterator[tuple[int, str, str, str]]:
    """Number, question, query and the table that the page shows."""
    for number, question, _, sql, table in _QUESTION.findall(PAGE.read_text(encoding="utf-8")):
        yield int(number), question, sql, table


def answer(conn: Connection, sql: str) -> str:
    """The result as the page shows it."""
    found = conn.execute(text(sql))
    names = list(found.keys())
    rows = [[shown(value) for value in row] for row in found]
    lines = [names, ["---" for _ in names], *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def shown(value: Any) -> str:
    """A value in the same words on every database: three decimals below a thousand, times to the second."""
    match value:
        case None:
            return "–"
        case bool() | int() | float() | Decimal():
            number = float(value)
            return f"{round(number):,}" if abs(number) >= 1000 else f"{round(number, 3):g}"
        case datetime():
            return (value.astimezone(UTC) if value.tzinfo else value).strftime("%Y-%m-%d %H:%M:%S")
        case date():
            return value.isoformat()
        case str() if re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}", value):  # a time of SQLite's
            return value[:19]
        case _:
            return str(value)


def main() -> None:
    """Write every answer into the page."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/sample.db"
        upgrade(url)
        engine = make_engine(url)
        with engine.begin() as conn:
            load(conn)
            page = _QUESTION.sub(
                lambda match: match[0][: match.start(5) - match.start()] + answer(conn, match[4]),
                PAGE.read_text(encoding="utf-8"),
            )
        engine.dispose()
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
