"""The GPU measurement counts right; all of it but the GPU runs here, on a toy model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from backend.api import GenerationHandle, GenerationRequest, Prompt, SamplingParams
from backend.assembly import make_core
from backend.config import EngineConfig
from backend.sequence import Sequence
from benchmarks import gpu, gpu_fleet, gpu_peer, overlap
from benchmarks.gpu_engine import configuration, measured, write_shape
from benchmarks.gpu_works import (
    LLAMA_8B,
    MIXED_FILE,
    TINY,
    Work,
    kv_bytes_a_token,
    mixed,
    parse_works,
    uniform,
    weight_bytes,
)
from benchmarks.step_cpu import CountingSink, StubRunner

# ------------------------------------------------------------------------------------------------------------ works


def test_the_mixed_work_is_shipped_with_where_it_comes_from() -> None:
    work = mixed()
    assert (len(work.requests), work.new_tokens, work.slots) == (1319, 356_149, 256)
    assert {new for _, new in work.requests} <= set(range(32, 513))
    short = mixed(count=5, shorten=4)
    assert short.name == "mixed-5/4"
    assert [new for _, new in short.requests] == [new // 4 for _, new in work.requests[:5]]
    about = json.loads(MIXED_FILE.read_text(encoding="utf-8"))["about"]
    assert "GSM8K" in about


def test_works_are_named_on_the_command_line() -> None:
    works = parse_works("32x256,mixed,mixed-5")
    assert [work.name for work in works] == ["32x256", "mixed", "mixed-5"]
    assert works[0] == uniform(32, 256)
    assert works[2].requests == works[1].requests[:5]
    (long,) = parse_works("32x200@4096")
    assert (long.name, long.requests[0], long.context) == ("32x200@4096", (4096, 200), 4312)
    for bad in ("32", "32x9@", "32x9@0", "mixed-0", "x5", "0x9", "32x1", "mixedup", "mixed-x"):
        with pytest.raises(ValueError, match=bad):
            parse_works(bad)


def test_prompts_repeat_and_stay_within_the_vocabulary() -> None:
    work = uniform(3, 4)
    assert work.prompts(512) == work.prompts(512)
    assert len(set(work.prompts(512))) == 3
    assert max(max(prompt) for prompt in work.prompts(512)) < 512


@pytest.mark.parametrize("shape", [dict(LLAMA_8B) | {"num_hidden_layers": 2}, dict(TINY)])
def test_the_floor_counts_the_bytes_of_the_model_that_runs(shape: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    read = [m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert weight_bytes(shape) == sum(read)
    heads = [m for name, m in model.named_modules() if name.endswith("k_proj")]
    assert kv_bytes_a_token(shape) == 2 * 2 * sum(module.weight.shape[0] for module in heads)


def test_the_floor_of_uniform_and_of_mixed_works() -> None:
    weights, kv = weight_bytes(TINY), kv_bytes_a_token(TINY)
    # 3 rows decode twice after their first token, over 65 and then 66 tokens.
    assert uniform(3, 3).floor_s(TINY, 1.0) == 2 * weights + 3 * (65 + 66) * kv
    # 3 + 1 + 1 decoded tokens fit in no fewer than three steps of two slots.
    work = Work("some", ((10, 4), (20, 2), (30, 2)), slots=2)
    read = (11 + 12 + 13) + 21 + 31
    assert work.floor_s(TINY, 1.0) == 3 * weights + read * kv


# ------------------------------------------------------------------------------------------------------- the engine


def test_a_work_is_measured_to_its_steady_part(tmp_path: Path) -> None:
    works = [uniform(4, 80), Work("mixed", ((9, 3), (5, 7), (4, 2)), 2)]
    folder = write_shape(tmp_path, TINY)
    with measured(configuration(folder, works, device="cpu")) as engine:
        facts = engine.describe()
        assert facts["max_num_seqs"] == 4
        assert facts["start_to_first_token_s"] > 0
        first, second = (engine.run(work) for work in works)
    assert first.tokens == 320
    assert first.step_ms == pytest.approx(1e3 * (first.whole_s - first.prefill_s) / 79)
    assert first.steady is not None
    assert 16 <= first.steady.steps < first.all.steps <= 82  # the last token, and one that ran on beside it
    for steps in (first.all, first.steady, second.all):
        assert 0 < steps.active <= 1
        assert steps.prepare_ms > 0
        assert steps.idle_ms >= 0
    assert (second.tokens, second.step_ms, second.steady) == (12, None, None)


def test_the_measurement_runs_part_by_part_and_says_which_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> dict[str, Any]:
        raise RuntimeError("no such peer here")

    monkeypatch.setattr(gpu_peer, "measure", refuse)
    kept, printed = tmp_path / "kept.json", tmp_path / "printed.txt"
    arguments = ["--tiny", "--device=cpu", "--works=4x80", "--parts=works,sync,peer"]
    assert gpu.main([*arguments, f"--json={kept}", f"--out={printed}"]) == 1
    record = json.loads(kept.read_text(encoding="utf-8"))
    assert record["failed"] == ["peer"]
    assert [work["name"] for work in record["works"]] == ["4x80"]
    assert [engine["mode"] for engine in record["engines"]] == ["async", "sync"]
    assert 0 < record["works"][0]["floor_share"] < 1
    text = printed.read_text(encoding="utf-8")
    assert "Asynchronous against synchronous" in text
    assert "peer failed: no such peer here" in text
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [["--parts", "works,nothing"], ["--works", "many"], ["--mixed", "/no/file"]]
)
def test_what_cannot_be_measured_is_refused_at_once(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.options_from(options)
    assert "error" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_the_peer_is_given_up_in_time(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not done after 0 s"):
        gpu_peer.measure(tmp_path, [uniform(2, 3)], device="cpu", timeout_s=0.01)


def test_the_peer_does_the_same_work(tmp_path: Path) -> None:
    found = gpu_peer.measure(write_shape(tmp_path, TINY), [uniform(2, 3)], device="cpu", timeout_s=200)
    assert found["attention"] == "sdpa"
    assert set(found["seconds"]) == {"2x3"}


def test_the_fleet_does_the_same_work(tmp_path: Path) -> None:
    works = [Work("mixed", ((9, 3), (5, 7), (4, 2)), 2), uniform(2, 5)]
    config = configuration(write_shape(tmp_path / "shape", TINY), works, device="cpu")
    found = list(gpu_fleet.measure(tmp_path / "fleet", config, works, timeout_s=200))
    assert [(each.name, each.tokens) for each in found] == [("mixed", 12), ("2x5", 10)]
    for each in found:
        assert 0 <= each.filling_s <= each.whole_s
        assert each.tokens_per_s == pytest.approx(each.tokens / each.whole_s)


# ------------------------------------------------------------------------------------------------------ the overlap


def test_intervals_merge_and_are_cut_to_a_window() -> None:
    merged = overlap.union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.5, 4.0)])
    assert merged == [(0.0, 3.0), (3.5, 4.0), (5.0, 6.0)]
    assert overlap.union(merged, gap=0.5) == [(0.0, 4.0), (5.0, 6.0)]
    assert overlap.length(merged, (2.0, 5.5)) == 1.0 + 0.5 + 0.5


_BASE_US = 7e9
_STEP_US, _KERNELS, _KERNEL_US, _GAP_US, _IDLE_US = 1000.0, 10, 95.0, 3.0, 20.0


def _trace(steps: int) -> dict[str, Any]:
    """Steps of ten kernels, 3 µs apart, with the rest of each 1,000 µs idle, as the profiler writes them."""

    def event(kind: str, name: str, at: float, us: float, correlation: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": kind,
            "name": name,
            "ts": at,
            "dur": us,
            "args": {"correlation": correlation},
        }

    events = [{"ph": "M", "name": "process_name"}]
    for step in range(steps):
        at = step * _STEP_US
        events.append(event("cuda_runtime", "cudaGraphLaunch", at - 500, 20, step))
        events.append(event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at - 520, 4, 1000 + step))
        events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 978, 2, 2000 + step))
        begins = [at + kernel * (_KERNEL_US + _GAP_US) for kernel in range(_KERNELS)]
        events += [event("kernel", "k", begin, _KERNEL_US, step) for begin in begins]
    return {"baseTimeNanoseconds": _BASE_US * 1e3, "traceEvents": events}


def _host(steps: int, late_us: float) -> list[overlap.HostStep]:
    found = []
    for step in range(steps):
        at = _BASE_US + step * _STEP_US + late_us
        one = overlap.HostStep(busy_us=980.0)
        one.phases["prepare"].append((at - 600, at - 510))
        one.phases["launch"].append((at - 510, at - 470))
        one.phases["wait"].append((at - 470, at - 10))
        one.phases["retire"].append((at - 10, at + 40))
        found.append(one)
    return found


def test_the_active_share_is_told_by_events_steps_and_kernels() -> None:
    found = overlap.evaluate(_trace(20), _host(20, 0.0), (_BASE_US + 2_500, _BASE_US + 17_500))
    # 9 gaps of 3 µs between the kernels of a step, 23 µs after its last one.
    span = _KERNELS * (_KERNEL_US + _GAP_US) - _GAP_US
    assert (found["steps"], found["step_us"]) == (13, _STEP_US)
    assert found["active"]["steps"] == pytest.approx(span / _STEP_US)
    assert found["active"]["kernels"] == pytest.approx(_KERNELS * _KERNEL_US / _STEP_US)
    assert found["active"]["events"] == pytest.approx(0.98)
    assert found["clock_shift_us"] == 0.0
    drawn = {name: len(found["rows"][name]) for name in ("prepare", "h2d", "compute", "d2h")}
    assert drawn == {"prepare": 4, "h2d": 4, "compute": 5, "d2h": 5}  # with the end of the step before


def test_clocks_that_disagree_are_brought_together() -> None:
    window = (_BASE_US + 2_500, _BASE_US + 17_500)
    right = overlap.evaluate(_trace(20), _host(20, 0.0), window)
    late = overlap.evaluate(_trace(20), _host(20, 100.0), window)
    assert late["clock_shift_us"] == pytest.approx(-110.0)  # into the middle of the launch
    assert late["rows"]["prepare"][0][0] == pytest.approx(right["rows"]["prepare"][0][0] - 10.0)


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(RuntimeError, match="0 of them within"):
        overlap.evaluate(_trace(3), _host(3, 0.0), (0.0, 1.0))


def test_the_picture_is_drawn_from_the_record(tmp_path: Path) -> None:
    found = overlap.evaluate(_trace(20), _host(20, 0.0), (_BASE_US + 2_500, _BASE_US + 17_500))
    record, picture = tmp_path / "record.json", tmp_path / "images" / "picture.svg"
    record.write_text(json.dumps({"runs": [found | {"mode": mode} for mode in ("async", "sync")]}))
    overlap.main([f"--record={record}", f"--out={picture}"])
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "async: 1.00 ms a step, GPU active 97.7%" in words
    assert words.count("compute") == 2
    assert picture.stat().st_size < 150_000


def test_the_phases_of_the_hosts_steps_are_noted_in_order() -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, block_size=16)
    core = make_core(
        config,
        runner=StubRunner(2),
        num_blocks=8,
        max_model_len=64,
        device=torch.device("cpu"),
        sink=CountingSink(),
    )
    request = GenerationRequest(
        request_id="1",
        prompt=Prompt(token_ids=(1, 2)),
        sampling=SamplingParams(max_tokens=5, ignore_eos=True),
    )
    core.add(
        Sequence(
            request,
            GenerationHandle(request, lambda: None),
            [1, 2],
            number=1,
            seed=0,
            eos_ids=frozenset(),
            max_new_tokens=5,
            arrived_at=0.0,
        )
    )
    with overlap.host_steps(core) as steps:
        while core.has_work():
            core.step()
    assert "step" not in vars(core)
    assert len(steps) == core.steps + 1  # the last call only retires
    whole = steps[1]
    order = [whole.phases[name][0] for name in ("prepare", "launch", "wait", "retire")]
    assert all(start <= end for start, end in order)
    assert [start for start, _ in order] == sorted(start for start, _ in order)
    assert whole.busy_us > 0
