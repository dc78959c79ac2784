"""From a prompt of any kind to checked token ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from backend.api import Prompt, RequestError


class PromptEncoder:
    """Turns raw text, chat messages or token ids into the model's token ids. Safe to use from any thread."""

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        # Fast tokenizers refuse concurrent use while their padding state is being set.
        self._lock = threading.Lock()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Raises:
            RequestError: an id outside the vocabulary, text without a tokenizer, messages without a chat
                template or that the template refuses, or text that comes to no token at all.
        """
        if prompt.token_ids is not None:
            self._check_ids(prompt.token_ids, "token_ids", f"Use ids from 0 to {self.vocab_size - 1}")
            return list(prompt.token_ids)
        field = "prompt" if prompt.prompt is not None else "messages"
        if self.tokenizer is None:
            raise RequestError(
                "this model runs without a tokenizer",
                field=field,
                fix="Send token_ids, or configure a tokenizer",
            )
        text, special = (prompt.prompt, True) if prompt.prompt is not None else (self._render(prompt), False)
        with self._lock:
            ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        if not ids:
            raise RequestError(
                "comes to no token at all", field=field, fix="Give at least one token of input"
            )
        # Some tokenizers have more tokens than their model.
        self._check_ids(
            ids, field, "Remove the text that stands for it, or configure the model's own tokenizer"
        )
        return list(ids)

    def _check_ids(self, ids: Sequence[int], field: str, fix: str) -> None:
        worst = max(ids)
        if worst >= self.vocab_size:
            raise RequestError(
                f"token id {worst} is outside the vocabulary of {self.vocab_size}", field=field, fix=fix
            )

    def _render(self, prompt: Prompt) -> str:
        assert self.tokenizer is not None
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                "this model has no chat template", field="messages", fix="Send a prompt instead"
            )
        turns = [{"role": m.role, "content": m.content} for m in prompt.messages or ()]
        from jinja2 import TemplateError

        # Templates are programs: besides refusing on purpose, they can trip over what they did not expect.
        refusals = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except refusals as exc:
            raise RequestError(
                f"the model's chat template refuses them: {exc}",
                field="messages",
                fix="Reorder or rename the roles",
            ) from exc
        return text
