"""The callback that a payload asks for, as its row."""

from __future__ import annotations

from models_db.callbacks import NewCallback
from workers.callbacks.urls import CallbackRules, check_callback_url
from workers.payload import GeneratePayload
from workers.settings import Settings


def wanted_callback(payload: GeneratePayload, settings: Settings) -> NewCallback | None:
    """``None`` where the payload asks for none.

    Raises:
        RequestError: the settings do not allow its URL.
    """
    if payload.callback_url is None:
        return None
    return new_callback(payload.callback_url, settings, include_output=payload.callback_include_output)


def new_callback(
    text: str, settings: Settings, *, include_output: bool = False, field: str = "callback_url"
) -> NewCallback:
    """A row for this URL.

    Raises:
        RequestError: the settings do not allow it; it names ``field``.
    """
    url = check_callback_url(text, CallbackRules.of(settings), field)
    return NewCallback(text, url.netloc, include_output)
