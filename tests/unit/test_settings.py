"""Settings: where they come from, what is refused and how, and that credentials stay hidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import ConfigurationError
from workers.redaction import redact_text, redact_url
from workers.settings import Settings, load_settings, misspelt_variables


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("TOKENMILL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults() -> None:
    settings = load_settings()
    assert settings.broker_url == "redis://127.0.0.1:6379/0"
    assert settings.celery_result_backend_url == settings.broker_url
    assert settings.accepted_models == ("smollm2",)
    assert settings.engine_config.model == "smollm2"
    assert settings.visibility_timeout_s > settings.dead_after_s


def test_overrides_win_over_environment_over_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenmill.toml").write_text(
        'model = "file"\nbackend = "file"\ndead_after_s = 9\n[engine]\nblock_size = 8\nmax_num_seqs = 4\n'
    )
    monkeypatch.setenv("TOKENMILL_MODEL", "env")
    monkeypatch.setenv("TOKENMILL_BACKEND", "env")
    monkeypatch.setenv("TOKENMILL_ENGINE_MAX_NUM_SEQS", "6")
    settings = load_settings(model="override")
    assert (settings.model, settings.backend, settings.dead_after_s) == ("override", "env", 9.0)
    assert (settings.engine.block_size, settings.engine.max_num_seqs) == (8, 6)
    assert load_settings(engine={"max_num_seqs": 2}).engine.max_num_seqs == 2


def test_both_spellings_of_engine_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_ENGINE_BLOCK_SIZE", "8")
    monkeypatch.setenv("TOKENMILL_ENGINE__MAX_NUM_SEQS", "5")
    engine = load_settings().engine
    assert (engine.block_size, engine.max_num_seqs) == (8, 5)


def test_named_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.toml"
    path.write_text('model = "m"\nmodels = ["a", "m"]\n')
    monkeypatch.setenv("TOKENMILL_CONFIG", str(path))
    assert load_settings().accepted_models == ("m", "a")
    path.write_text("model = ")
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_settings()
    path.unlink()
    with pytest.raises(ConfigurationError, match="TOKENMILL_CONFIG: cannot read"):
        load_settings()


def test_a_list_in_the_environment_is_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_MODELS", "a, b,,c")
    assert load_settings().models == ("a", "b", "c")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"borker_url": "x"}, "borker_url"),
        ({"broker_url": "amqp://u:hunter2@h"}, "TOKENMILL_BROKER_URL"),
        ({"broker_url": "redis://h:port/0"}, "TOKENMILL_BROKER_URL"),
        ({"broker_url": "redis://h:99999/0"}, "TOKENMILL_BROKER_URL"),
        ({"broker_url": "redis://h/zero"}, "TOKENMILL_BROKER_URL"),
        ({"database_url": "tokenmill.db"}, "TOKENMILL_DATABASE_URL"),
        ({"dead_after_s": 2, "heartbeat_interval_s": 1}, "dead_after_s"),
        ({"visibility_timeout_s": 3, "lease_interval_s": 2}, "visibility_timeout_s"),
        ({"engine": {"block_size": 0}}, "TOKENMILL_ENGINE_BLOCK_SIZE"),
        ({"engine": {"blok_size": 4}}, "engine.blok_size"),
        ({"engine": {"max_num_seqs": 9, "max_num_batched_tokens": 3}}, "max_num_batched_tokens"),
        ({"log_level": "loud"}, "TOKENMILL_LOG_LEVEL"),
        ({"finaliser_threads": 9}, "finaliser_threads"),
    ],
)
def test_bad_settings_are_named(overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(**overrides)
    assert named in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_engine_model_may_lie_elsewhere() -> None:
    settings = load_settings(model="shown", engine={"model": "/models/real"})
    assert settings.engine_config.model == "/models/real"
    assert load_settings(model="shown").engine_config.model == "shown"


@pytest.mark.parametrize(("slots", "expected"), [(1, 8), (32, 8), (256, 64)])
def test_headroom_grows_with_the_slots(slots: int, expected: int) -> None:
    assert load_settings().headroom(slots) == expected
    assert load_settings(prefetch_headroom=0).headroom(slots) == 0


SECRET = "hunter2-secret"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        (f"redis://:{SECRET}@host:1/0", "redis://:***@host:1/0"),
        (
            f"rediss://user:{SECRET}@host/0?ssl_cert_reqs=required",
            "rediss://user:***@host/0?ssl_cert_reqs=required",
        ),
        (f"redis://user:{SECRET}@odd@host/0", "redis://user:***@host/0"),
        (f"postgresql+psycopg://u:{SECRET}@h/db", "postgresql+psycopg://u:***@h/db"),
        (f"postgresql://h/db?user=u&password={SECRET}", "postgresql://h/db?user=u&password=***"),
        ("sqlite:///tokenmill.db", "sqlite:///tokenmill.db"),
        ("sqlite:////abs/path.db", "sqlite:////abs/path.db"),
        ("redis://user@host/0", "redis://user@host/0"),
    ],
)
def test_redaction(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@given(st.from_regex(r"\A[A-Za-z0-9!$&'()*+,;=._~-]{8,20}\Z"))
def test_no_rendering_of_the_settings_shows_a_password(password: str) -> None:
    url = f"redis://user:{password}@host:6379/0"
    settings = Settings(broker_url=url, database_url=f"postgresql://u:{password}@h/d", worker_name="w")
    for text in (repr(settings), str(settings), redact_text(f"cannot reach {url}!"), redact_url(url)):
        assert password not in text


def test_reading_settings_imports_neither_torch_nor_celery() -> None:
    code = (
        "import sys, workers.settings, workers.payload; "
        "print([m for m in ('torch', 'celery', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:1/",
        "rediss://u:p%2Fw@[::1]:6379/15?ssl_cert_reqs=none",
        "redis+socket:///run/redis.sock",
        "sentinel://a:1;sentinel://b:2",
    ],
)
def test_every_kind_of_redis_url_is_accepted(url: str) -> None:
    assert load_settings(broker_url=url).broker_url == url


def test_a_password_with_an_at_sign_is_hidden_in_any_text() -> None:
    assert redact_text(f"no answer from redis://u:x@{SECRET}@host:1/0, again") == (
        "no answer from redis://u:***@host:1/0, again"
    )


def test_variables_that_look_like_a_setting_are_found() -> None:
    environ = {
        "TOKENMILL_BROKR_URL": "x",
        "TOKENMILL_BROKER_URL": "x",
        "TOKENMILL_CONFIG": "x",
        "TOKENMILL_ENGINE_BLOCK_SIZE": "8",
        "TOKENMILL_SERVICE_PORT_8080_TCP": "x",
        "BROKR_URL": "x",
    }
    assert misspelt_variables(environ) == {"TOKENMILL_BROKR_URL": "TOKENMILL_BROKER_URL"}


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("VISIBILITY_TIMEOUT_S", "soon", "must be a number (got 'soon'). Use a number"),
        ("FINALISER_THREADS", "2.5", "must be a whole number (got '2.5'). Use a whole number"),
        ("FINALISER_THREADS", "0", "must be at least 1 (got '0'). Use 1 or more"),
        ("TASK_EVENTS", "perhaps", "must be true or false (got 'perhaps'). Use true or false"),
        ("ENGINE_MODE", "both", "must be 'async' or 'sync' (got 'both'). Use 'async' or 'sync'"),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"TOKENMILL_{variable}", value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert str(caught.value).endswith(f": {words}")
    assert f"TOKENMILL_{variable}" in str(caught.value)
