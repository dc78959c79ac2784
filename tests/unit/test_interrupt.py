"""Signals at moments of our own choosing."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from workers.interrupt import Interruptible, Undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_raised_at_the_next_pause(number: signal.Signals) -> None:
    with Interruptible() as signals:
        signals.sleep(0)
        signals.check()
        os.kill(os.getpid(), number)
        assert signals.requested  # the work went on to here
        with pytest.raises(KeyboardInterrupt):
            signals.check()
        with pytest.raises(KeyboardInterrupt):
            signals.sleep(60)


def test_a_pause_is_cut_short() -> None:
    with Interruptible() as signals:
        thread = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            signals.sleep(3600)  # longer than a test may take
        thread.join()


def test_a_second_signal_raises_at_once() -> None:
    with Interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_clean_up_is_not_disturbed_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interruptible(), Undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_other_threads_can_use_it_without_handlers() -> None:
    seen: list[bool] = []

    def work() -> None:
        with Interruptible() as signals, Undisturbed():
            signals.sleep(0)
            seen.append(signals.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [False]
