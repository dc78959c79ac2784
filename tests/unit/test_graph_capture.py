"""What surrounds a capture, without a GPU."""

from __future__ import annotations

import gc

import pytest

from backend.graphs import no_collection


def test_nothing_is_collected_within() -> None:
    assert gc.isenabled()
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_within_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), no_collection():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
