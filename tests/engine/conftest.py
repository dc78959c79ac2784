"""Tiny models, loaded once a session, and what transformers itself makes of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import Backend, GenerationHandle, GenerationRequest, Prompt, SamplingParams
from backend.config import EngineConfig
from backend.core import EngineCore
from backend.engine import AsyncEngine
from backend.kv_cache import LayerShape
from backend.loading import LoadedModel, load_model
from backend.probe import probe_layers
from backend.runner import Runner
from backend.slots import Slot
from tests.engine import backend_kinds
from tests.engine.backend_kinds import Fault, Kind
from tests.engine.backend_requests import Start, assert_idle
from tests.engine.tiny_models import FAMILIES, VOCAB, save_tiny_model, save_tiny_tokenizer

NEW_TOKENS = 14


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much to their start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_engine_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    # The backend that the tests of one kind of backend share outlives each of them, see ``shared``.
    before = set(threading.enumerate()) if "kind" in request.fixturenames else set()
    yield
    named = ("tokenmill-engine", "tokenmill-output", "echo-backend", "transformers-backend")
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name in named]


@dataclass
class TinyModel:
    """A family's model on the paged engine, and in transformers' own hands."""

    family: str
    folder: Path
    loaded: LoadedModel
    layers: list[LayerShape]
    native: Any
    prompts: list[list[int]] = field(default_factory=list)
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def greedy(self, prompt: list[int], count: int = NEW_TOKENS) -> list[int]:
        """The first ``count`` new tokens of transformers' greedy ``generate``, which nothing ends early."""
        key = tuple(prompt)
        if len(self._greedy.get(key, ())) < count:
            output = self.native.generate(
                torch.tensor([prompt]),
                max_new_tokens=max(count, NEW_TOKENS),
                do_sample=False,
                eos_token_id=None,
            )
            self._greedy[key] = output[0, len(prompt) :].tolist()
        return self._greedy[key][:count]


def make_prompts(vocab: int) -> list[list[int]]:
    """Prompts of many lengths; some begin alike, by whole blocks and by parts of one."""
    rng = random.Random(7)
    base = [rng.randrange(3, vocab) for _ in range(48)]
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in (1, 2, 3, 4, 7, 8, 9, 16, 17, 31)]
    prompts += [base[:n] for n in (5, 8, 16, 33)]
    prompts += [base[:k] + [rng.randrange(3, vocab) for _ in range(n)] for k, n in ((8, 1), (12, 4), (16, 9))]
    return prompts


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """``tiny(family)``: made once a session."""
    from transformers import AutoModelForCausalLM

    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            folder = save_tiny_model(family, tmp_path_factory.mktemp("models") / family)
            save_tiny_tokenizer(folder)
            loaded = load_model(EngineConfig(model=str(folder), dtype="float64", device="cpu"))
            native = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            ).eval()
            # None in the call means "the configuration's own".
            native.generation_config.eos_token_id = None
            made[family] = TinyModel(
                family, folder, loaded, probe_layers(loaded).layers, native, prompts=make_prompts(VOCAB)
            )
        return made[family]

    return get


@pytest.fixture(scope="session")
def llama(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("llama")


class Gate:
    """Lets the engine's thread through to the device or holds it up there; also breaks the device on demand."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._open = threading.Event()
        self._open.set()
        self._left: int | None = None  # steps until the gate closes
        self._reached = threading.Semaphore(0)
        self.error: BaseException | None = None

    def close(self, after: int = 0) -> None:
        """Hold the next step up, or the one ``after`` so many."""
        self._left = after

    def open(self) -> None:
        self._left = None
        self._open.set()

    def wait_until_reached(self) -> None:
        """Until a step stands before the closed gate."""
        assert self._reached.acquire(timeout=30)

    def execute(self, slot: Slot, previous: Slot | None) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._open.clear()
        if not self._open.is_set():
            self._reached.release()
            assert self._open.wait(timeout=60)
        if self.error is not None:
            raise self.error
        self._runner.execute(slot, previous)


@dataclass
class RunningEngine:
    """A started engine with a gate before its device."""

    engine: AsyncEngine
    gate: Gate

    @property
    def core(self) -> EngineCore:
        assert self.engine._parts is not None
        return self.engine._parts.core

    def submit(self, source: str | list[int] | list[tuple[str, str]], **options: Any) -> GenerationHandle:
        """Submit text, token ids or (role, content) turns; ``options`` are sampling parameters and the request's."""
        if isinstance(source, str):
            prompt = Prompt(prompt=source)
        elif source and isinstance(source[0], tuple):
            prompt = Prompt.model_validate(
                {"messages": [{"role": role, "content": content} for role, content in source]}  # type: ignore[misc]
            )
        else:
            prompt = Prompt(token_ids=tuple(source))  # type: ignore[arg-type]
        own = {key: options.pop(key) for key in ("priority", "deadline_s", "stream") if key in options}
        request = GenerationRequest(request_id="r", prompt=prompt, sampling=SamplingParams(**options), **own)
        return self.engine.submit(request)

    def check_idle(self) -> None:
        """Stop, then see that nothing is left anywhere."""
        self.engine.shutdown(drain=True, timeout_s=60)
        assert self.engine._death is None
        self.core.check_idle()
        assert self.core.allocator.num_free == self.core.allocator.num_blocks
        assert self.engine._output is not None
        assert not self.engine._output._assemblers
        assert not self.engine._output._settled


MakeEngine = Callable[..., RunningEngine]


@pytest.fixture
def make_engine(llama: TinyModel) -> Iterator[MakeEngine]:
    """``make_engine(**config)``: a started engine of the tiny Llama in float64, shut down after the test."""
    made: list[RunningEngine] = []

    def make(
        clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None, **config: Any
    ) -> RunningEngine:
        options: dict[str, Any] = {
            "model": str(llama.folder),
            "dtype": "float64",
            "device": "cpu",
            "num_kv_blocks": 64,
            "block_size": 4,
            "debug_poison": True,
        }
        engine = AsyncEngine(EngineConfig(**{**options, **config}), clock=clock, rng=rng)
        engine.start()
        assert engine._parts is not None
        core = engine._parts.core
        gate = Gate(core._runner)
        core._runner = gate
        made.append(RunningEngine(engine, gate))
        return made[-1]

    yield make
    for running in made:
        running.gate.open()
        running.engine.shutdown(drain=False)


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def any_model(request: pytest.FixtureRequest, tiny: Callable[[str], TinyModel]) -> TinyModel:
    model: TinyModel = tiny(request.param)
    return model


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that the backends of each kind run."""
    return backend_kinds.save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=backend_kinds.KINDS, ids=lambda kind: str(kind.name))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def shared(kind: Kind, byte_model: Path) -> Iterator[Backend]:
    """A backend with four slots that most tests of a module share, as jobs do."""
    backend = kind.build(kind.config(byte_model), Fault())
    yield backend
    backend.shutdown(drain=False)


@pytest.fixture
def backend(shared: Backend) -> Iterator[Backend]:
    """The shared backend; after the test nothing of its requests may be left in it."""
    yield shared
    assert_idle(shared)


@pytest.fixture
def start(kind: Kind, byte_model: Path) -> Iterator[Start]:
    """Start backends of one's own, which end with the test."""
    started: list[Backend] = []

    def build(fault: Fault | None = None, **changes: Any) -> Backend:
        started.append(kind.build(kind.config(byte_model, **changes), fault or Fault()))
        return started[-1]

    yield build
    for backend in started:
        backend.shutdown(drain=False)
