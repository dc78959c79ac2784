"""What callers of the OpenAI API may write, and how it is refused: by the name that they wrote."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions
from openai.types.chat import ChatCompletion
from sqlalchemy import func, select

from models_db.session import reading
from models_db.tables import Job
from tests.fleet.doorway import serving
from tests.fleet.fleet import Fleet, RedisServer
from workers.serve.requests import _BOOKKEEPING, _NOTHING, ChatRequest, CompletionRequest, _Request

BAD = openai.BadRequestError
ASK = [{"role": "user", "content": "one two three four"}]


@pytest.fixture(scope="module")
def fleet(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(redis_server, f"sqlite:///{tmp_path_factory.mktemp('serve') / 'fleet.db'}")
    running.worker()
    yield running
    running.close()


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with (
        serving(fleet.settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made,
    ):
        yield made


def jobs_in(fleet: Fleet) -> int:
    with reading(fleet.engine) as conn:
        return conn.scalar(select(func.count()).select_from(Job)) or 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            {"expires_after": {"anchor": "created_at", "seconds": 3600}},
            r"expires_after\[anchor\]: files stay until",
        ),
        ({"extra_body": {"color": "red"}}, "color: no such field"),
    ],
)
def test_what_an_upload_asks_for_in_vain_is_refused(
    client: openai.OpenAI, more: dict[str, Any], named: str
) -> None:
    with pytest.raises(BAD, match=named):
        client.files.create(file=("x.jsonl", b"{}"), purpose="batch", **more)
    assert client.files.list().data == []


@pytest.mark.parametrize(
    ("prompt", "message"), [([-1], "be at least 0"), ([[1], [-1]], "be at least 0"), ([[]], "not be empty")]
)
def test_a_prompt_that_is_wrong_is_named_as_the_caller_wrote_it(
    client: openai.OpenAI, prompt: Any, message: str
) -> None:
    with pytest.raises(BAD, match=f"prompt: must {message}") as caught:
        client.completions.create(model="echo", prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("create", "known"),
    [(Completions.create, ChatRequest), (TextCompletions.create, CompletionRequest)],
)
def test_every_parameter_of_the_official_client_is_known(create: Any, known: type[_Request]) -> None:
    """Either it is taken, or it is refused as what this service cannot do; never as a field that does not exist."""
    ours = {"self", "timeout", *(f"extra_{part}" for part in ("headers", "query", "body"))}
    names = set(inspect.signature(create).parameters) - ours
    assert names - set(known.model_fields) - _BOOKKEEPING - set(_NOTHING) == set()


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 3)])
def test_a_key_is_of_a_request_for_so_many_answers(
    client: openai.OpenAI, fleet: Fleet, first: int, then: int
) -> None:
    headers = {"Idempotency-Key": f"{first} and {then}"}

    def ask(n: int) -> ChatCompletion:
        made = client.chat.completions.create(
            model="echo",
            messages=ASK,  # type: ignore[arg-type]
            n=n,
            max_tokens=2,
            extra_headers=headers,
        )
        assert isinstance(made, ChatCompletion)
        return made

    made = ask(first)
    assert ask(first).id == made.id
    before = jobs_in(fleet)
    with pytest.raises(openai.ConflictError, match="was used before for another request"):
        ask(then)
    assert jobs_in(fleet) == before
