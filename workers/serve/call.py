"""One HTTP request, with who makes it and what it may use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from starlette.requests import Request

from models_db.session import reading
from models_db.text import clean_text
from workers.client import AsyncClient
from workers.serve.errors import ApiError, invalid, refused, wrong_kind
from workers.serve.feeder import BatchFeeder
from workers.settings import Settings

T = TypeVar("T")


class Call:
    """One request, with who makes it."""

    def __init__(
        self,
        request: Request,
        client: AsyncClient,
        feeder: BatchFeeder,
        tenant: str | None,
        timeout_s: float,
    ) -> None:
        self.request = request
        self.client = client
        self.feeder = feeder
        self.tenant = tenant
        self.timeout_s = timeout_s

    def check_names(self) -> None:
        """Refuse ids and other words of the path or the query that no database can be asked for.

        Raises:
            ApiError: names the one.
        """
        for name, value in (*self.request.path_params.items(), *self.request.query_params.items()):
            if clean_text(value) != value:
                fix = "Write it in characters that text has"
                raise refused("holds NUL or a lone surrogate", param=name, value=value, fix=fix)

    @property
    def settings(self) -> Settings:
        """The settings of the fleet."""
        return self.client.sync.settings

    async def json(self) -> object:
        """The body.

        Raises:
            ApiError: it is no JSON, or larger than any prompt that is accepted.
        """
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also what keeps other sites' forms out
            raise wrong_kind(kind, "application/json")
        most = 8 * self.settings.max_prompt_chars + 2**20
        body = bytearray()
        async for piece in self.request.stream():
            body += piece
            if len(body) > most:
                raise ApiError(
                    413, f"the body is larger than {most} bytes. Shorten it", kind="invalid_request_error"
                )
        try:
            return json.loads(bytes(body))
        except ValueError as error:
            raise invalid(f"the body is no JSON: {error}") from None
        except RecursionError:
            raise invalid("the body is nested too deeply. Flatten it") from None

    async def read(self, look: Callable[[Connection], T]) -> T:
        """Ask the database, on a thread."""

        def work() -> T:
            with reading(self.client.sync.engine()) as conn:
                return look(conn)

        return await asyncio.to_thread(work)


def page_size(request: Request, *, most: int, default: int) -> int:
    """The query's ``limit``.

    Raises:
        ApiError: it is no number from 1 to ``most``.
    """
    text = request.query_params.get("limit", str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise refused("is out of range", param="limit", value=text, fix=f"Use a number from 1 to {most}")
    return int(text)
