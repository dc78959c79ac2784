"""Tests that measure a GPU's free memory run alone on it, without waiting for ever."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.gpu.gpu_lock import device_lock

WAIT_S = 20


class Holder:
    """A thread that holds the device from when it gets it until it is let go."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self.got, self._let_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(folder, alone), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, alone: bool) -> None:
        with device_lock(folder, alone=alone):
            self.got.set()
            self._let_go.wait(WAIT_S)

    def let_go(self) -> None:
        self._let_go.set()
        self._thread.join(WAIT_S)


def test_one_that_is_to_be_alone_waits_for_all_and_keeps_later_ones_out(tmp_path: Path) -> None:
    first, second = (Holder(tmp_path, alone=False) for _ in range(2))
    assert first.got.wait(WAIT_S)
    assert second.got.wait(WAIT_S)  # side by side
    alone = Holder(tmp_path, alone=True)
    first.let_go()
    assert not alone.got.wait(0.2)
    late = Holder(tmp_path, alone=False)
    assert not late.got.wait(0.2)
    second.let_go()
    assert alone.got.wait(WAIT_S)
    assert not late.got.wait(0.2)
    alone.let_go()
    assert late.got.wait(WAIT_S)
    late.let_go()
