"""What a web application imports must not bring the GPU host's packages along."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["backend.api", "backend.config", "backend.registry", "backend.stopping"])
def test_light_modules_import_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'celery', 'sqlalchemy'} & set(sys.modules)\n"
        "print(*sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_the_engine_knows_neither_celery_nor_sql() -> None:
    code = (
        "import sys, backend.engine, backend.transformers_backend, backend.echo\n"
        "print(*sorted({'celery', 'kombu', 'sqlalchemy', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_client_imports_neither_celery_nor_alembic() -> None:
    code = (
        "import sys, workers.client\n"
        "print(*sorted({'torch', 'numpy', 'celery', 'kombu', 'alembic', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
