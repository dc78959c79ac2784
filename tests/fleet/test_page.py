"""The page of the FastAPI example in headless Chromium: a person asks, watches, stops, loses the connection."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from models_db.tables import JobState
from tests.chaos.proxy import Proxy
from tests.fleet.conftest import MakeFleet
from tests.fleet.fleet import Fleet, RedisServer, wait_until
from tests.servers import free_port
from workers.demo import PROMPTS

EXAMPLES = PROMPTS.parent
WORDS = " ".join(f"word{number}" for number in range(60))
PATIENCE_S = 60.0
INSTALL = "apt-get install chromium chromium-driver"

# Keeps every text that the answer ever had, so that a test need not look at the right moment.
WATCH = """
window.seen = [];
new MutationObserver(() => window.seen.push(document.getElementById("answer").textContent))
  .observe(document.getElementById("answer"), {childList: true, characterData: true, subtree: true});
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """The browser. Where there is none, CI fails; elsewhere the tests are skipped and say what to install."""
    driver = shutil.which("chromedriver")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or browser is None:
        missing = f"the page is tested in Chromium, which is not installed. Run: {INSTALL}"
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(missing, pytrace=False)
        pytest.skip(f"NOT TESTED: {missing}")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=900,700"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium's sandbox refuses to be run by root
    for argument in arguments:
        options.add_argument(argument)
    profile = tmp_path_factory.mktemp("chromium")
    options.add_argument(f"--user-data-dir={profile}")
    service = webdriver.ChromeService(executable_path=driver, log_output=str(profile / "driver.log"))
    with webdriver.Chrome(options=options, service=service) as running:
        running.set_script_timeout(PATIENCE_S)
        yield running


@pytest.fixture(scope="module")
def fleet(module_fleet: MakeFleet) -> Fleet:
    """One worker that says thirty words a second."""
    running = module_fleet(engine={"echo_tokens_per_s": 30})
    running.worker()
    return running


@contextmanager
def application(port: int, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example as its text says to run it."""
    command = [sys.executable, "-m", "uvicorn", "web_fastapi:app", "--app-dir", str(EXAMPLES)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, cwd=log.parent, stdout=file, stderr=file
        )
        try:
            wait_until(lambda: _answers(process, port, log), PATIENCE_S, "the application to answer")
            yield process
        finally:
            process.kill()
            process.wait(20)


def _answers(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    try:
        status = httpx2.get(f"http://127.0.0.1:{port}/questions/none").status_code
        assert status == 404, f"status {status}\n{log.read_text()[-2000:]}"
        return True
    except httpx2.TransportError:
        assert process.poll() is None, log.read_text()
        return False


class Page:
    """The page as a person sees it."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self._browser = browser
        browser.get("about:blank")
        browser.get_log("browser")  # forget those of earlier pages
        browser.get(url)
        browser.execute_script(WATCH)

    def ask(self, text: str) -> None:
        field = self._browser.find_element(By.ID, "text")
        field.clear()
        field.send_keys(text)
        self._browser.find_element(By.ID, "send").click()

    def click(self, name: str) -> None:
        self._browser.find_element(By.ID, name).click()

    def text(self, name: str) -> str:
        return str(self.script("return document.getElementById(arguments[0]).textContent", name))

    def enabled(self, name: str) -> bool:
        return self._browser.find_element(By.ID, name).is_enabled()

    def script(self, source: str, *arguments: object) -> Any:
        return self._browser.execute_script(source, *arguments)

    def job(self) -> str:
        """The id of the question, which the page keeps in its address."""
        return str(self.script("return location.hash.slice(1)"))

    def until(self, name: str, says: Callable[[str], bool], what: str) -> str:
        return wait_until(lambda: says(self.text(name)) and self.text(name), PATIENCE_S, what) or ""

    def end(self) -> str:
        """Wait for the end; what the page says of it."""
        return self.until("state", lambda text: "written" in text, "the end of the answer")

    def errors(self) -> list[str]:
        """What the browser's console says of mistakes."""
        return [entry["message"] for entry in self._browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def redis_proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    """Between the application and Redis."""
    proxy = Proxy(redis_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def web(fleet: Fleet, redis_proxy: Proxy, tmp_path: Path) -> Iterator[Proxy]:
    """Between the browser and the application; its port is the page's."""
    environment = os.environ | fleet.environment()
    environment |= {
        "TOKENMILL_BROKER_URL": f"redis://127.0.0.1:{redis_proxy.port}/0",
        "TOKENMILL_MAX_PROMPT_CHARS": "2000",
        "PYTHONPATH": str(EXAMPLES.parent),
    }
    port = free_port()
    with application(port, environment, tmp_path / "web.log"):
        proxy = Proxy(port)
        yield proxy
        proxy.close()


@pytest.fixture
def page(chromium: webdriver.Chrome, web: Proxy) -> Page:
    return Page(chromium, f"http://127.0.0.1:{web.port}/")


def test_the_answer_grows_while_it_is_watched_and_ends_with_its_usage(page: Page, fleet: Fleet) -> None:
    page.ask(WORDS)
    early = page.until("answer", bool, "the first words")
    assert page.text("state") == "answering"
    assert not page.enabled("send")
    later = page.until("answer", lambda text: len(text) > len(early), "more words")
    assert fleet.state(page.job()) is JobState.RUNNING, "what was seen so far came before the end"
    assert later.startswith(early)
    end = page.end()
    stored = fleet.result(page.job())
    assert stored is not None
    assert page.text("answer") == stored.text
    assert end == (
        f"succeeded ({stored.finish_reason}): {stored.prompt_tokens} tokens read, "
        f"{stored.completion_tokens} written"
    )
    seen = page.script("return window.seen")
    assert all(after.startswith(before) for before, after in pairwise(seen) if after)
    assert page.enabled("send")
    assert page.errors() == []


def test_markup_in_an_answer_is_shown_and_not_run(page: Page) -> None:
    evil = "<img src=x onerror=window.hacked=1> <b>bold</b> <script>window.hacked=1</script>"
    page.ask(evil)
    assert page.end().startswith("succeeded")
    assert "<b>bold</b>" in page.text("answer")
    assert page.script("return document.getElementById('answer').childElementCount") == 0
    assert page.script("return window.hacked ?? null") is None
    assert page.errors() == []


def test_the_button_stops_an_answer(page: Page, fleet: Fleet) -> None:
    page.ask(WORDS)
    page.until("answer", bool, "the first words")
    page.click("stop")
    assert page.end().startswith("cancelled: ")
    assert fleet.state(page.job()) is JobState.CANCELLED
    assert page.enabled("send")
    assert not page.enabled("stop")
    assert page.errors() == []


def test_a_connection_that_is_cut_goes_on_behind_the_last_event(
    page: Page, web: Proxy, fleet: Fleet, tmp_path: Path
) -> None:
    page.ask(WORDS)
    before = page.until("answer", lambda text: "word3" in text, "some words")
    assert web.cut() > 0
    page.until("error", lambda text: "Trying again" in text or not text, "the page to notice")
    assert page.end().startswith("succeeded")
    stored = fleet.result(page.job())
    assert stored is not None
    assert page.text("answer") == stored.text, "nothing is missing and nothing came twice"
    seen = page.script("return window.seen")
    known = seen.index(before)
    assert all(text.startswith(before) for text in seen[known:]), "the answer did not begin again"
    assert page.text("error") == ""


def test_an_application_that_is_started_again_goes_on(
    chromium: webdriver.Chrome, fleet: Fleet, tmp_path: Path
) -> None:
    environment = os.environ | fleet.environment() | {"PYTHONPATH": str(EXAMPLES.parent)}
    port, log = free_port(), tmp_path / "web.log"
    with application(port, environment, log):
        page = Page(chromium, f"http://127.0.0.1:{port}/")
        page.ask(WORDS)
        page.until("answer", lambda text: "word3" in text, "some words")
    page.until("error", lambda text: "connection is lost" in text, "the page to say so")
    with application(port, environment, log):
        assert page.end().startswith("succeeded")
        stored = fleet.result(page.job())
        assert stored is not None
        assert page.text("answer") == stored.text
        page.script("location.reload()")
        reloaded = wait_until(
            lambda: "written" in page.text("state") and page.text("answer"), PATIENCE_S, "the page again"
        )
        assert reloaded == stored.text, "an answer is still there for a page that is loaded again"


def test_what_is_wrong_is_said_in_words(page: Page, web: Proxy, fleet: Fleet) -> None:
    page.script("document.getElementById('text').value = 'x'.repeat(3000)")
    page.click("send")
    said = page.until("error", bool, "the refusal of a long text")
    assert "2000" in said
    assert "{" not in said, "a sentence, not JSON"
    assert page.enabled("send")
    jobs = len(fleet.states())
    web.refuse()
    page.ask("hello there")
    page.until("error", lambda text: text == "The server cannot be reached. Try again.", "the network's end")
    web.forward()
    page.click("send")
    assert page.end().startswith("succeeded")
    assert page.text("error") == ""
    assert len(fleet.states()) == jobs + 1
    failed = [message for message in page.errors() if "Failed to load resource" not in message]
    assert failed == [], "the browser notes each refused call; the page itself made no mistake"


def test_a_fleet_that_is_away_is_said_and_waited_for(page: Page, redis_proxy: Proxy, fleet: Fleet) -> None:
    page.ask(WORDS)
    page.until("answer", bool, "the first words")
    redis_proxy.refuse()
    said = page.until("error", bool, "the page to say that the service is away")
    assert said == "The service cannot be reached now. Trying again."
    redis_proxy.forward()
    assert page.end().startswith("succeeded")
    stored = fleet.result(page.job())
    assert stored is not None
    assert page.text("answer") == stored.text
    assert page.text("error") == ""


def test_an_unknown_question_in_the_address_is_said(chromium: webdriver.Chrome, web: Proxy) -> None:
    page = Page(chromium, f"http://127.0.0.1:{web.port}/#none")
    page.until("error", lambda text: text == "There is no such question.", "the page to say so")
    assert page.enabled("send")
