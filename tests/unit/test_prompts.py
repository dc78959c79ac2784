"""From prompts to checked token ids."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError, UndefinedError

from backend.api import Prompt, RequestError
from backend.prompts import PromptEncoder


class Letters:
    """A tokenizer whose tokens are code points, with 1 before each text that asks for special tokens."""

    chat_template: str | None = "yes"
    failure: Exception | None = None

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = [ord(char) for char in text if char != "~"]
        return {"input_ids": [1, *ids] if add_special_tokens and ids else ids}

    def apply_chat_template(
        self, turns: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        if self.failure is not None:
            raise self.failure
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in turns)


def turns(*pairs: tuple[str, str]) -> Prompt:
    return Prompt.model_validate(
        {"messages": [{"role": role, "content": content} for role, content in pairs]}
    )


def test_text_gets_special_tokens_and_rendered_chats_do_not() -> None:
    encoder = PromptEncoder(Letters(), 200)
    assert encoder.encode(Prompt(prompt="ab")) == [1, 97, 98]
    assert encoder.encode(turns(("u", "a"), ("b", "c"))) == [ord(char) for char in "<u>a<b>c"]
    assert encoder.encode(Prompt(token_ids=(5, 0, 199))) == [5, 0, 199]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt(token_ids=(1, 200)), "token_ids"),
        (Prompt(prompt="a\u00e9"), "prompt"),
        (turns(("u", "\u00e9")), "messages"),
    ],
)
def test_ids_outside_the_vocabulary(prompt: Prompt, field: str) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary of 200") as caught:
        PromptEncoder(Letters(), 200).encode(prompt)
    assert caught.value.field == field
    assert caught.value.fix


def test_text_that_comes_to_nothing() -> None:
    with pytest.raises(RequestError, match="no token at all") as caught:
        PromptEncoder(Letters(), 200).encode(Prompt(prompt="~~"))
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "field"), [(Prompt(prompt="a"), "prompt"), (turns(("u", "a")), "messages")]
)
def test_text_without_a_tokenizer(prompt: Prompt, field: str) -> None:
    with pytest.raises(RequestError, match="without a tokenizer") as caught:
        PromptEncoder(None, 200).encode(prompt)
    assert caught.value.field == field


def test_messages_without_a_template() -> None:
    tokenizer = Letters()
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        PromptEncoder(tokenizer, 200).encode(turns(("u", "a")))


@pytest.mark.parametrize(
    "failure", [TemplateError("roles must alternate"), UndefinedError("x"), TypeError("x"), KeyError("x")]
)
def test_a_template_that_refuses_or_trips(failure: Exception) -> None:
    tokenizer = Letters()
    tokenizer.failure = failure
    with pytest.raises(RequestError, match="chat template refuses") as caught:
        PromptEncoder(tokenizer, 200).encode(turns(("u", "a")))
    assert caught.value.field == "messages"
    assert caught.value.__cause__ is failure
