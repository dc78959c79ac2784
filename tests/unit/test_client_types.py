"""What editors and type checkers are told of the client is what it takes."""

from __future__ import annotations

import inspect

from workers.client import AsyncClient, Client, PayloadFields
from workers.payload import GeneratePayload


def test_the_fields_are_those_of_the_payload() -> None:
    given_by_name = {"prompt", "messages", "token_ids", "model"}
    assert set(PayloadFields.__annotations__) == GeneratePayload.model_fields.keys() - given_by_name


def test_both_clients_take_the_same() -> None:
    for name in ("submit", "submit_many", "status", "result", "cancel", "wait", "stream"):
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (Client, AsyncClient))
        assert ours.parameters == theirs.parameters, name
