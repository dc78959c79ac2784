"""Every revision goes up, down and up again with data present, and leaves what the models say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import CheckConstraint, inspect, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from models_db.base import Base
from models_db.batches import create_batch
from models_db.errors import SchemaError
from models_db.jobs import insert_jobs
from models_db.migrate import alembic_config, check_differences, downgrade, upgrade
from models_db.schema import check_schema, current_revision, head_revision, known_revisions
from models_db.session import make_engine
from models_db.tables import Batch, Job
from models_db.workers import add_samples
from tests.db.helpers import add_jobs, add_workers, claim_one, finish_one, new_job, new_sample

ROOT = Path(__file__).parents[2]
TABLES = {table.name for table in Base.metadata.sorted_tables}


@pytest.fixture
def engine(empty_url):
    engine = make_engine(empty_url)
    yield engine
    engine.dispose()


def fill(engine):
    add_workers(engine, "w")
    with engine.begin() as conn:
        create_batch(conn, name="n", batch_id="b")
        insert_jobs(conn, [new_job("in-batch", batch_id="b", position=1)])
        add_samples(conn, [new_sample("w")])
    add_jobs(engine, "queued", "running", "done")
    claim_one(engine, "running", "w")
    claim_one(engine, "done", "w")
    finish_one(engine, "done", 1, "w")


def test_up_down_up_step_by_step_with_data_present(empty_url, engine):
    revisions = [
        script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()
    ][::-1]
    for revision in revisions:
        upgrade(empty_url, revision)
    fill(engine)
    for lower, upper in zip([*revisions[-2::-1], "base"], revisions[::-1], strict=True):
        downgrade(empty_url, lower)
        upgrade(empty_url, upper)  # with the rows that the lower revision kept
        downgrade(empty_url, lower)
    assert not TABLES & set(inspect(engine).get_table_names())
    for revision in revisions:
        upgrade(empty_url, revision)
        assert current_revision(engine) == revision
    fill(engine)
    check_differences(empty_url)


def test_an_upgrade_that_has_nothing_to_do_keeps_the_data(empty_url, engine):
    upgrade(empty_url)
    fill(engine)
    upgrade(empty_url)
    with engine.connect() as conn:
        assert len(conn.execute(select(Job.id)).all()) == 4


def test_the_check_sees_a_difference_and_spares_other_applications_tables(empty_url, engine):
    upgrade(empty_url)
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE someone_elses (id INTEGER PRIMARY KEY)"))
    check_differences(empty_url)
    with engine.begin() as conn:
        conn.execute(text("ALTER TABLE batch ADD COLUMN stray INTEGER"))
    with pytest.raises(Exception, match="stray"):
        check_differences(empty_url)
    downgrade(empty_url, "base")
    assert "someone_elses" in inspect(engine).get_table_names()


def test_the_files_are_named_after_their_revisions():
    script = ScriptDirectory.from_config(alembic_config())
    assert known_revisions() == [step.revision for step in script.walk_revisions()][::-1]
    assert head_revision() == script.get_current_head()


def test_check_schema_names_both_revisions_and_the_command(empty_url, engine):
    head = head_revision()
    engine.connect().close()  # which makes the file of an SQLite database
    with pytest.raises(SchemaError, match=rf"no revision, and {head} is needed. Run `tokenmill db upgrade`"):
        check_schema(engine)
    assert current_revision(engine) is None
    upgrade(empty_url)
    check_schema(engine)
    with engine.begin() as conn:
        conn.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(
        SchemaError, match=rf"revision 9999, which this version does not know \(its own is {head}\)"
    ):
        check_schema(engine)


def test_constraints_and_indexes_are_named_alike_everywhere(db):
    inspector = inspect(db)
    for table in Base.metadata.sorted_tables:
        names = {index["name"] for index in inspector.get_indexes(table.name)}
        assert {index.name for index in table.indexes} <= names
        checks = {check["name"] for check in inspector.get_check_constraints(table.name)}
        assert checks == {str(c.name) for c in table.constraints if isinstance(c, CheckConstraint)}
        keys = {key["name"] for key in inspector.get_foreign_keys(table.name)}
        assert keys == {c.name for c in table.foreign_key_constraints}


def test_check_constraints_say_the_same_in_models_and_revisions(tmp_path):
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("models", "revisions")]
    engines = [make_engine(url) for url in urls]
    Base.metadata.create_all(engines[0])
    upgrade(urls[1])
    models, revisions = (
        {
            name: sorted((c["name"], c["sqltext"]) for c in inspect(engine).get_check_constraints(name))
            for name in TABLES
        }
        for engine in engines
    )
    assert models == revisions


@pytest.mark.parametrize(
    "change",
    [
        "state = 'succeeded'",
        "state = 'unheard-of'",
        "state = 'running', attempt = 1, started_at = created_at",
        "state = 'running', owner = 'w', attempt = 1",
        "state = 'running', owner = 'w', started_at = created_at",
        "owner = 'w'",
        "owner = 'nobody', state = 'running', attempt = 1, started_at = created_at",
        "finished_at = created_at",
        "state = 'succeeded', finished_at = created_at, error_type = 'boom'",
        "priority = 10",
        "attempt = -1",
        "batch_id = 'nowhere'",
        "model = NULL",
    ],
)
def test_the_database_itself_refuses_states_that_make_no_sense(db, change):
    add_workers(db, "w")
    add_jobs(db, "j")
    with pytest.raises((IntegrityError, OperationalError)), db.begin() as conn:
        conn.execute(text(f"UPDATE job SET {change}"))


@pytest.mark.parametrize("change", ["state = 'completed'", "finished_at = created_at", "state = 'nonsense'"])
def test_a_batch_ends_with_its_time(db, change):
    with db.begin() as conn:
        create_batch(conn, name="n", batch_id="b")
    with pytest.raises((IntegrityError, OperationalError)), db.begin() as conn:
        conn.execute(text(f"UPDATE batch SET {change}"))
    with db.connect() as conn:
        assert conn.scalar(select(Batch.finished_at)) is None


def test_two_hosts_may_upgrade_at_once(empty_url, engine):
    code = f"from models_db.migrate import upgrade; upgrade({empty_url!r})"
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    check_schema(engine)


def test_the_alembic_command_works_from_anywhere(tmp_path):
    def alembic(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "alembic", "-c", str(ROOT / "alembic.ini"), *arguments],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k != "TOKENMILL_DATABASE_URL"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    url = {"TOKENMILL_DATABASE_URL": "sqlite:///here.db"}
    assert alembic("upgrade", "head", **url).returncode == 0
    done = alembic("check", **url)
    assert (done.returncode, "No new upgrade operations detected" in done.stdout) == (0, True), done.stderr
    assert (tmp_path / "here.db").exists()
    unset = alembic("current")
    assert unset.returncode != 0
    assert "Set TOKENMILL_DATABASE_URL" in unset.stderr + unset.stdout


def test_offline_scripts_are_refused_with_a_reason(tmp_path):
    from alembic import command
    from alembic.util import CommandError

    with pytest.raises(CommandError, match="Leave out --sql"):
        command.upgrade(alembic_config(f"sqlite:///{tmp_path / 'x.db'}"), "head", sql=True)
