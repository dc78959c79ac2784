"""Three streams of our own, tied by events: nothing waits that need not, and nothing is used before it is there."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.streams import STREAM_NAMES, CudaStreams
from tests.gpu.gpu_driver import CoreDriver, outcome, skinny_products
from tests.gpu.gpu_models import DEVICE, LARGE, large_products, make_prompts, save_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Record = Callable[[str, object], None]
DELAY_US = {"llama": 400, LARGE: 1500}  # many times what a step of the model takes

GREEDY: list[dict[str, Any]] = [{}]
RANDOM: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 4},
]
EVERYTHING: list[dict[str, Any]] = [
    *RANDOM,
    {"repetition_penalty": 1.2, "presence_penalty": 0.2, "seed": 5, "temperature": 0.7},
    {"logit_bias": {7: 2.0}, "logprobs": 3},
    {"frequency_penalty": 0.4, "logprobs": 0, "stop_token_ids": [3, 4], "min_tokens": 9, "ignore_eos": False},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


def drive(driver: CoreDriver, kinds: list[dict[str, Any]], count: int = 30) -> list[Any]:
    """Requests that arrive at fixed steps and outgrow the cache; what each of them got."""
    prompts = make_prompts(count)
    sequences = []
    for i, prompt in enumerate(prompts):
        sequences.append(driver.add(prompt, max_tokens=10 + i % 30, **kinds[i % len(kinds)]))
        if i % 5 == 4:
            for _ in range(4):
                driver.core.step()
    driver.run()
    assert not driver.sink.errors
    return [outcome(sequence) for sequence in sequences]


@pytest.fixture(scope="module", params=["async", "sync"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "no graphs"])
def graphs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def tight(mode: str, graphs: bool) -> dict[str, Any]:
    """A cache so small that requests are preempted, in a dtype whose results depend on each launch's shape."""
    return {"dtype": "bfloat16", "num_kv_blocks": 16, "mode": mode, "cuda_graphs": graphs}


@pytest.fixture(scope="module", params=list(DELAY_US))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, family: str) -> Path:
    found: Path = request.getfixturevalue("large_model" if family == LARGE else "folder")
    return found


@pytest.fixture(scope="module")
def undelayed(family: str, model: Path, tight: dict[str, Any]) -> list[Any]:
    with skinny_products() as products:
        driver = CoreDriver(model, **tight)
        got = drive(driver, EVERYTHING)
    assert driver.core.scheduler.num_preemptions > 0
    assert products == (large_products() if family == LARGE else set())
    return got


@pytest.mark.parametrize("late", STREAM_NAMES)
def test_outputs_stay_the_same_while_one_stream_is_late(
    family: str, model: Path, tight: dict[str, Any], undelayed: list[Any], late: str
) -> None:
    """Tokens and log-probabilities, to the bit, while the host's buffers are poisoned as they are released."""
    driver = CoreDriver(model, **tight, debug_delay=f"{late}:{DELAY_US[family]}", debug_poison=True)
    assert drive(driver, EVERYTHING) == undelayed


_DEAF = """
import sys
from tests.gpu.gpu_driver import CoreDriver, outcome
from tests.gpu.gpu_models import make_prompts

folder, late = sys.argv[1:]
settings = {"max_num_batched_tokens": 512, "num_kv_blocks": 400}

def run(deaf, **options):
    driver = CoreDriver(folder, **settings, **options)
    sequences = [driver.add(prompt, max_tokens=30) for prompt in make_prompts(8)]
    for _ in range(4):
        driver.core.step()
    for slot in driver.core.slots if deaf else ():
        if late == "h2d":
            slot.input_ready = Deaf(slot.input_ready)
        elif late == "compute":
            slot.compute_end = Deaf(slot.compute_end)
        else:
            slot.output_ready = Deaf(slot.output_ready)
            slot.compute_end = Deaf(slot.compute_end, waits=True)
    while driver.core.has_work():
        driver.core.step()
    return [outcome(sequence) for sequence in sequences]

class Deaf:
    "A mark that nobody waits for."
    def __init__(self, mark, waits=False):
        self._mark, self._waits = mark, waits
    def record(self):
        self._mark.record()
    def wait(self):
        if self._waits:
            self._mark.wait()
    def synchronize(self):
        pass
    def seconds_since(self, earlier):
        return 0.0

right = run(False)
assert run(False, debug_delay=late + ":3000") == right
print("same", flush=True)
print("same" if run(True, debug_delay=late + ":3000") == right else "different", flush=True)
"""


@pytest.mark.parametrize("late", STREAM_NAMES)
def test_a_late_stream_shows_a_wait_that_is_missing(folder: Path, late: str) -> None:
    """Or the tests above could not fail. In a process of its own: inputs that come too late may be any address.

    The host has poisoned them by then, or is about to write others. Outputs that are read too early are wrong tokens
    and no more.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DEAF, str(folder), late],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout.split()
    assert said[:1] == ["same"], done.stderr[-2000:]
    crashed = said[1:] == [] and re.search(r"CUDA error|Error \[CUDA\]", done.stderr)
    assert said[1:] == ["different"] or (late == "h2d" and crashed), done.stderr[-2000:]


def test_streams_are_our_own_and_do_not_wait_for_the_default_stream() -> None:
    streams = CudaStreams(DEVICE)
    driver = ctypes.CDLL("libcuda.so.1")
    handles = set()
    for context in (streams.h2d, streams.compute, streams.d2h):
        with context():
            handle = torch.cuda.current_stream(DEVICE).cuda_stream
        flags = ctypes.c_uint()
        assert driver.cuStreamGetFlags(ctypes.c_void_p(handle), ctypes.byref(flags)) == 0
        assert flags.value == 1  # CU_STREAM_NON_BLOCKING
        handles.add(handle)
    assert len(handles) == 3
    assert torch.cuda.default_stream(DEVICE).cuda_stream not in handles


def test_a_busy_default_stream_holds_nothing_up(folder: Path, mode: str) -> None:
    driver = CoreDriver(folder, mode=mode, prefix_cache=False)  # or the second run would have less to do
    before = drive(driver, EVERYTHING)
    default = torch.cuda.default_stream(DEVICE)
    with torch.cuda.stream(default):
        torch.cuda._sleep(20 * 10**9)  # ten seconds, many times what the run takes
    assert drive(driver, EVERYTHING) == before
    assert not default.query(), "the run waited for the default stream, or took ten seconds"
    default.synchronize()


@pytest.mark.parametrize(
    "kinds", [GREEDY, RANDOM, EVERYTHING], ids=["greedy", "random", "penalties, biases, log-probabilities"]
)
def test_the_loop_waits_for_nothing_but_the_previous_steps_output(
    folder: Path, kinds: list[dict[str, Any]], mode: str
) -> None:
    """PyTorch raises an error wherever one of its operations makes the host wait for the device."""
    driver = CoreDriver(folder, mode=mode, prefix_cache=False)  # or the second run would have less to do
    before = drive(driver, kinds)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = drive(driver, kinds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == before


@pytest.mark.parametrize(
    "kinds", [RANDOM, EVERYTHING], ids=["random", "penalties, biases, log-probabilities"]
)
def test_one_pinned_copy_each_way_and_a_stream_for_each_part(
    folder: Path, tmp_path: Path, kinds: list[dict[str, Any]], record_property: Record
) -> None:
    """As a profiler saw it, not as we meant it."""
    driver = CoreDriver(folder, prefix_cache=False)
    drive(driver, kinds)
    for slot in driver.core.slots:
        assert slot._host_in.is_pinned()
        assert slot._host_out.is_pinned()
    steps = driver.core.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        drive(driver, kinds)
        torch.cuda.synchronize()
    steps = driver.core.steps - steps
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    into = [e for e in copies if "HtoD" in e["name"]]
    out = [e for e in copies if "DtoH" in e["name"]]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memset")]
    record_property("copies in, out, steps", f"{len(into)}, {len(out)}, {steps}")
    assert Counter(e["name"] for e in copies if e not in into + out and "DtoD" not in e["name"]) == {}
    assert all("Pinned" in e["name"] for e in into + out), {e["name"] for e in into + out}
    assert len(into) == len(out) == steps
    places = [{e["args"]["stream"] for e in part} for part in (into, kernels, out)]
    assert [len(place) for place in places] == [1, 1, 1], places
    assert len(set.union(*places)) == 3
