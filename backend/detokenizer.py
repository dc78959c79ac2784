"""Text of a growing sequence of tokens, piece by piece, equal in the end to decoding them all at once.

Decoders look at more than one token: a character's bytes can be spread over several, a leading space is stripped
from the first, a word's ending depends on whether another follows. So each step decodes a short window of the latest
tokens, whose beginning is known text, and takes what is new. Text that later tokens could still change is held back.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_WINDOW = 8  # tokens kept as context; an incomplete character spans four bytes at most, so four tokens
_WINDOW_LIMIT = 16  # tokens decoded at most, except within a run of byte tokens
_RUN_LIMIT = 256  # byte tokens in a row up to which their tentative text is looked at


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Text of the tokens."""

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The vocabulary's entry for a token id, None where there is none."""

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The token id of a vocabulary entry, None or the unknown token's where there is none."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids that ``skip_special_tokens`` leaves out."""


class TextDecoder:
    """A model's tokenizer, with what incremental decoding needs to know about it. Make one a model and share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._visible: dict[int, bool] = {}
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: list[int]) -> str:
        """Text of all these tokens, special ones left out and spaces as they are."""
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, a special one's name included; empty for an id beyond the vocabulary."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._token_text(token_id)
        return text

    def _token_text(self, token_id: int) -> str:
        entry = self._tokenizer.convert_ids_to_tokens(token_id)
        if entry is None:
            return ""
        if token_id in self._special_ids:
            return str(entry)
        # Where spaces are part of a word's entry, decoders strip one from the first word of a text.
        spaces = len(entry) - len(entry.lstrip("\u2581"))
        return " " * spaces + self.decode([token_id]).lstrip(" ") if spaces else self.decode([token_id])

    def is_visible(self, token_id: int) -> bool:
        """Whether decoding takes any notice of the token: it is in the vocabulary, and it is not special.

        A model's logits may be wider than its tokenizer's vocabulary.
        """
        visible = self._visible.get(token_id)
        if visible is None:
            known = self._tokenizer.convert_ids_to_tokens(token_id) is not None
            visible = self._visible[token_id] = known and token_id not in self._special_ids
        return visible

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", None)
        if added is None:
            return frozenset(self._tokenizer.all_special_ids)
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of tokens like ``<0x0A>`` that the decoder turns into bytes, a whole run of them at a time."""
        ids = {}
        for byte in range(256):
            token = f"<0x{byte:02X}>"
            token_id = self._tokenizer.convert_tokens_to_ids(token)
            if token_id is not None and self._tokenizer.convert_ids_to_tokens(token_id) == token:
                ids[byte] = token_id
        letters = [byte for byte in ids if chr(byte).isalpha() and byte < 128]
        if all(self.decode([ids[byte]]) == chr(byte) for byte in letters):
            return frozenset(ids.values())
        return frozenset()  # entries that only look like bytes


class IncrementalDetokenizer:
    """Text of one sequence as its tokens arrive.

    All pieces and the flushed rest together equal ``TextDecoder.decode`` of all tokens. Constant work a token, on
    the average; a run of byte tokens is decoded when it ends.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text that were given out
        self._run = 0  # byte tokens at the window's end
        self._held = ""  # text after what was given out, without the run

    def push(self, token_id: int) -> str:
        """Take a token; returns the text that is certain now and was not before."""
        if not self._decoder.is_visible(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._decoder.byte_ids:
            # Whether these bytes are characters is decided for the run as a whole, by the token that ends it.
            self._run += 1
            return ""
        self._run = 0
        text = self._window_text()
        certain = len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        self._held = text[self._shown :]
        if len(self._window) > _WINDOW_LIMIT:
            self._window = self._window[-_WINDOW:]
            self._shown = len(self._window_text()) - len(self._held)
        return piece

    @property
    def pending(self) -> str:
        """What would follow if the sequence ended here; later tokens may still change it.

        Empty within a run of more than 256 byte tokens, so that asking after each token stays cheap.
        """
        if self._run:
            return self._window_text()[self._shown :] if self._run <= _RUN_LIMIT else ""
        return self._held

    def flush(self) -> str:
        """The rest of the text; call once, after the last token."""
        rest = self._window_text()[self._shown :]
        self._shown += len(rest)
        self._held, self._run = "", 0
        return rest

    def _window_text(self) -> str:
        return self._decoder.decode(self._window)
