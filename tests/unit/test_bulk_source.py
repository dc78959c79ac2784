"""Values for lines that do not say are checked once, and the complaint names the option."""

from __future__ import annotations

from typing import Any

import pytest

from backend.api import RequestError
from workers.bulk_formats import Shape
from workers.bulk_input import LineOptions
from workers.bulk_source import check_defaults
from workers.settings import Settings


def check(shape: Shape | None = None, /, **defaults: Any) -> None:
    settings = Settings(models=("smollm2",), tenant_max_open_tokens=1000)
    options = LineOptions(
        {"model": "smollm2"} | defaults, check=lambda payload: payload.check_limits(settings)
    )
    given = ("model", "max_tokens", "temperature", "tenant")
    check_defaults(options, shape or Shape(), {name: f"--{name.replace('_', '-')}" for name in given})


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"foo": 3}, r"^--param foo: unknown field \(got 3\)\. Remove it or correct its spelling$"),
        ({"top_p": 2}, "^--param top_p: must be at most 1"),
        ({"tenant": ""}, "^--tenant: "),
        ({"model": "nope"}, r"^--model: is not served here \(got 'nope'\)\. Use one of: smollm2$"),
        ({"temperature": 500}, "^--temperature: must be at most 100"),
        ({"max_tokens": 0}, "^--max-tokens: must be at least 1"),
        ({"stop": [""]}, "^--param stop: "),
        ({"version": 2}, r"^--param version: is the payload.s, and must be 1"),
    ],
)
@pytest.mark.parametrize("shape", [Shape(), Shape("csv")])
def test_an_option_that_suits_no_line_is_named(shape: Shape, defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check(shape, **defaults)


@pytest.mark.parametrize(
    "defaults",
    [
        {"max_tokens": 8, "temperature": 0.5, "tenant": "acme", "stop": "END", "seed": 1},
        {"min_tokens": 500},  # a line may ask for more than the default of max_tokens
        {"min_tokens": 9, "max_tokens": 3},
        {"callback_include_output": True},  # a line may have the address
        {"token_ids": [1, 2]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ],
)
def test_options_that_some_line_may_make_right_pass(defaults: dict[str, Any]) -> None:
    check(**defaults)


def test_options_of_openai_s_bodies_are_what_some_body_can_have() -> None:
    check(Shape("openai"), max_completion_tokens=5, echo=False)
    with pytest.raises(RequestError, match=r"^--param foo: no such field \(got 3\)\. Leave it out"):
        check(Shape("openai"), foo=3)
    with pytest.raises(RequestError, match=r"^--param n: a line gives one answer"):
        check(Shape("openai"), n=2)
    with pytest.raises(RequestError, match=r"^--max-tokens: "):
        check(Shape("openai"), max_tokens=0)
