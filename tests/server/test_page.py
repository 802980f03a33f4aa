"""The playground in a real browser, before the real application over an engine without a model.

Needs Playwright for Python and a Chromium: ``PILOTFISH_CHROMIUM`` names it, or it is found on the PATH. Without them
the tests are skipped, unless ``PILOTFISH_REQUIRE_BROWSER=1`` asks for a failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from engines import engine_with, plain
from fake_llm import Letters
from fakes import PageCheckingRunner
from pilotfish.engine import Engine
from pilotfish.types import SamplingParams
from servers import RunningServer, make_host, running, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

pytestmark = pytest.mark.slow

_TIMEOUT_MS = 120_000
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_EOS_BIAS = -30.0  # no answer ends by itself, whatever its seed
_SIZE = {"max_model_len": 256, "num_pages": 256, "max_num_batched_tokens": 256}


class Words(Letters):
    """Any text in: each character becomes some letter. Chats as the server's chat endpoint wants them."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % 26 for character in text]

    def apply_chat_template(self, messages: Sequence[Any], *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode("".join(f"{message['role'][0]}{message['content']}" for message in messages) + "a")


class Gate:
    """Lets the engine's steps pass one by one, so that a test sees an answer half done."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def pass_steps(self, count: int) -> None:
        for _ in range(count):
            self._passes.release()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        while not self._open.is_set():
            if self._passes.acquire(timeout=0.05):
                return


@dataclass
class Served:
    """A running server and the gate of its engine."""

    url: str
    gate: Gate
    running: RunningServer

    def stop(self) -> None:
        self.gate.open()
        self.running.server.should_exit = True
        wait_for(lambda: self.running.host.state == "stopped")


def make_engine(gate: Gate) -> Engine:
    class GatedRunner(PageCheckingRunner):
        def forward(self, segments: Any) -> Any:
            gate.wait()
            return super().forward(segments)

    return engine_with("guess", 4, eos_bias=_EOS_BIAS, runner_class=GatedRunner, tokenizer=Words(), **_SIZE)


def expected_text(prompt: str, max_tokens: int) -> str:
    """What plain decoding answers."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    tokens = Words().apply_chat_template([{"role": "user", "content": prompt}])
    return plain(tokens, params, eos_bias=_EOS_BIAS, **_SIZE).outputs[0].text


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    gate = Gate()
    host = make_host(lambda: make_engine(gate), shutdown_timeout=1.0)
    with running(host, model_names=("tiny",), summary_interval=0, **settings) as server:
        try:
            yield Served(f"{server.url}/", gate, server)
        finally:
            gate.open()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    required = os.environ.get("PILOTFISH_REQUIRE_BROWSER") == "1"
    missing = pytest.fail if required else pytest.skip
    path = os.environ.get("PILOTFISH_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        missing(f"no Chromium: set PILOTFISH_CHROMIUM, or put one of {', '.join(_NAMES)} on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no Playwright: pip install playwright")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=_TIMEOUT_MS)
        try:
            yield running
        finally:
            running.close()


@dataclass
class Visit:
    """A tab, and what went wrong in it."""

    page: Page
    context: BrowserContext
    problems: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def ask(self, prompt: str, max_tokens: int = 24, **fields: str) -> None:
        """Fill in the form and send it by its button."""
        self.fill(prompt, max_tokens, **fields)
        self.page.click("#send")

    def fill(self, prompt: str, max_tokens: int = 24, **fields: str) -> None:
        self.page.evaluate("document.getElementById('settings').open = true")
        for name, value in {"prompt": prompt, "max-tokens": str(max_tokens), **fields}.items():
            self.page.fill(f"#{name.replace('_', '-')}", value)

    def wait(self) -> None:
        """Until nothing runs."""
        self.page.wait_for_selector("#send:not([disabled])")

    def wait_for(self, expression: str) -> None:
        """Until it holds. ``page.wait_for_function`` evaluates strings in the page, which its policy forbids."""
        for _ in range(_TIMEOUT_MS // 50):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def steps(self) -> int:
        return self.page.locator(".step").count()

    def answers(self) -> list[str]:
        return [text or "" for text in self.page.locator(".answer").all_text_contents()]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Opens a server's page in a tab of its own; at the end it must not have complained."""
    visits: list[Visit] = []

    def open_page(url: str, **options: Any) -> Visit:
        options = {"viewport": {"width": 1200, "height": 900}, "reduced_motion": "no-preference"} | options
        context = browser.new_context(**options)
        context.set_default_timeout(_TIMEOUT_MS)
        page = context.new_page()
        made = Visit(page, context)
        visits.append(made)
        page.on("pageerror", lambda error: made.problems.append(str(error)))
        page.on("console", lambda message: made.problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: made.urls.append(request.url))
        page.goto(url)
        return made

    yield open_page
    for made in visits:
        made.context.close()
        # That a request was refused is what some tests are about; the browser says so in its console.
        assert [text for text in made.problems if "Failed to load resource" not in text] == []


def chunk(text: str, is_draft: bool = False, **more: Any) -> str:
    tokens = [{"id": 1, "text": text, "is_draft": is_draft}]
    body = {"choices": [{"index": 0, "delta": {"content": text}}], "pilotfish": {"tokens": tokens}, **more}
    return f"data: {json.dumps(body)}\n\n"


# ---- one answer ----


def test_an_answer_comes_step_by_step(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    page = here.page
    server.gate.close()
    try:
        here.ask("why is the sky blue", 40)
        page.wait_for_selector(".panel.running")
        assert page.is_disabled("#send") and page.is_enabled("#stop")
        for count in (1, 1, 2):
            before = here.steps()
            server.gate.pass_steps(count)
            here.wait_for(f"document.querySelectorAll('.step').length === {before + count}")
        assert here.steps() == 4
        assert page.locator(".figures dd").nth(5).text_content() != "40"
    finally:
        server.gate.open()
    here.wait()
    assert here.answers() == [expected_text("why is the sky blue", 40)]
    assert page.locator(".figures dd").nth(5).text_content() == "40"
    assert page.text_content(".badge") == "ngram, 4 drafts a step · cut at max tokens"
    assert page.is_enabled("#send") and page.is_disabled("#stop")


def test_drafts_and_target_tokens_are_told_apart(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    here.ask("tell me of fish", 40)
    here.wait()
    drafts = here.page.locator(".answer .token.draft")
    targets = here.page.locator(".answer .token.target")
    assert drafts.count() > 0 and targets.count() > 0
    assert drafts.count() + targets.count() == 40  # every token here is a letter
    style = "node => [getComputedStyle(node).borderBottomStyle, getComputedStyle(node).backgroundColor]"
    draft, target = drafts.first.evaluate(style), targets.first.evaluate(style)
    assert draft[0] == "solid" and target[0] == "dotted"  # not by colour alone
    assert draft[1] != target[1]


def test_pointing_at_a_step_outlines_it_and_says_what_it_was(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    here.ask("tell me of the sea", 40)
    here.wait()
    step = here.page.locator(".step").nth(2)
    assert step.evaluate("node => getComputedStyle(node).outlineStyle") == "none"
    step.hover()
    assert step.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    drafts, tokens = step.locator(".draft").count(), step.locator(".token").count()
    line = here.page.text_content(".step-line") or ""
    found = re.fullmatch(r"step 3: (\d+) drafts? accepted, (\d+) tokens?, [\d.]+ ms", line)
    assert found is not None and (int(found[1]), int(found[2])) == (drafts, tokens)
    here.page.hover("#prompt")
    assert here.page.text_content(".step-line") == ""


def test_charts_show_the_run(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    page = here.page
    assert page.get_attribute("#chart-steps", "aria-label") == "Tokens a step: no data yet"
    here.ask("draw", 40)
    here.wait()
    assert f"40 tokens in {here.steps()} steps" in (page.get_attribute("#chart-steps", "aria-label") or "")
    assert page.locator("#chart-steps .bar-target").count() == here.steps()
    assert page.locator("#chart-acceptance .bar-draft").count() == 4
    assert re.search(r"position 0: \d+%, position 1", page.get_attribute("#chart-acceptance", "aria-label") or "")
    assert re.search(r"median [\d.]+ ms a token", page.get_attribute("#chart-latency", "aria-label") or "")


def test_drafts_a_step_can_be_chosen(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    here.ask("no drafts", num_drafts="0")
    here.wait()
    assert here.page.locator(".answer .token.draft").count() == 0
    assert here.steps() == 24
    assert (here.page.text_content(".badge") or "").startswith("plain decoding ")
    here.ask("no drafts", num_drafts="1")
    here.wait()
    assert 12 <= here.steps() < 24
    assert (here.page.text_content(".badge") or "").startswith("ngram, 1 draft a step ")


def test_the_form_becomes_the_request(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    with here.page.expect_request("**/v1/chat/completions") as sent:
        here.ask("hello", 8, system="be brief", temperature="0.5", top_p="0.9", seed="7", num_drafts="3")
    assert sent.value.post_data_json == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_speculation_stats": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 8,
        "seed": 7,
        "speculation": {"enabled": True, "num_drafts": 3},
    }
    here.wait()
    assert here.answers() != [""]


def test_text_is_never_markup(server: Served, visit: Callable[..., Visit]) -> None:
    text = '<img src=x onerror="document.title=1"> 🐟\u2028海 &amp;'
    here = visit(server.url)
    body = chunk(text) + chunk("", True) + 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'

    def answer(route: Route) -> None:
        route.fulfill(
            status=200, content_type="text/event-stream", body=body.replace("\n", "\r\n") + "data: [DONE]\n\n"
        )

    here.page.route("**/v1/chat/completions", answer)
    here.ask("hello")
    here.wait()
    assert here.answers() == [text]
    assert here.page.locator(".answer img").count() == 0
    assert here.page.title() == "Pilotfish playground"


def test_copy_takes_the_text(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url, permissions=["clipboard-read", "clipboard-write"])
    here.ask("copy this")
    here.wait()
    here.page.click(".copy")
    here.page.wait_for_selector("text=Copied")
    assert here.page.evaluate("navigator.clipboard.readText()") == here.answers()[0] != ""


# ---- compare ----


def test_compare_runs_one_after_the_other_and_ends_with_equal_texts(
    server: Served, visit: Callable[..., Visit]
) -> None:
    here = visit(server.url)
    events: list[str] = []
    bodies: list[Any] = []

    def note(request: Any) -> None:
        if "chat/completions" in request.url:
            events.append("sent")
            bodies.append(request.post_data_json)

    here.page.on("request", note)
    here.page.on("requestfinished", lambda request: events.append("done") if "chat" in request.url else None)
    here.page.check("#compare")
    here.ask("compare the two", 60, temperature="1")
    here.page.wait_for_selector("#verdict:not([hidden])")
    here.wait()
    assert events[:3] == ["sent", "done", "sent"]  # not at once: each would slow the other
    assert bodies[0]["speculation"] == {"enabled": True} and bodies[1]["speculation"] == {"enabled": False}
    assert bodies[0]["seed"] == bodies[1]["seed"] and isinstance(bodies[0]["seed"], int)
    verdict = here.page.text_content("#verdict") or ""
    assert "The texts are equal." in verdict and f"the seed {bodies[0]['seed']}" in verdict
    assert re.match(r"\d+\.\d\d\u00d7the speed of plain decoding", verdict)
    fast, slow = here.answers()
    assert fast == slow and len(fast) >= 8
    panels = here.page.locator(".panel")
    assert panels.nth(0).locator(".token.draft").count() > 0
    assert panels.nth(1).locator(".token.draft").count() == 0
    assert panels.nth(0).locator(".step").count() < panels.nth(1).locator(".step").count()
    assert "plain decoding" in (panels.nth(1).locator(".badge").text_content() or "")
    assert here.page.locator("#chart-latency polyline").count() == 2


def test_compare_says_so_if_texts_differ(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    texts = iter(["equal so far", "equal no more"])
    end = 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    here.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=chunk(next(texts)) + end),
    )
    here.page.check("#compare")
    here.ask("compare", seed="1")
    here.page.wait_for_selector("#verdict:not([hidden])")
    assert "The texts differ from character 7 on." in (here.page.text_content("#verdict") or "")


# ---- keyboard, stop ----


def test_all_of_it_by_keyboard(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    page, focused = here.page, "document.activeElement.id || document.activeElement.className"
    page.wait_for_selector("#model option", state="attached")
    here.fill("", 40)
    page.evaluate("document.activeElement.blur()")
    page.evaluate("getSelection().removeAllRanges()")
    seen: list[str] = []
    while not seen or seen[-1] != "prompt":
        page.keyboard.press("Tab")
        seen.append(page.evaluate(focused))
        assert len(seen) < 10
    page.keyboard.type("by keys alone")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".step")
    here.wait()
    assert page.evaluate(focused) == "prompt"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "answer":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert (page.text_content(".step-line") or "").startswith("step 2: ")
    page.keyboard.press("End")
    assert (page.text_content(".step-line") or "").startswith(f"step {here.steps()}: ")
    page.keyboard.press("ArrowRight")  # there is none
    page.keyboard.press("ArrowLeft")
    assert (page.text_content(".step-line") or "").startswith(f"step {here.steps() - 1}: ")


def test_escape_stops_the_answer_here_and_in_the_engine(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    server.gate.close()
    try:
        here.ask("never to end", 200)
        server.gate.pass_steps(2)
        here.wait_for("document.querySelectorAll('.step').length === 2")
        here.page.keyboard.press("Escape")
        here.wait()
        assert here.page.is_hidden("#error")
        assert here.page.text_content("#announce") == "Stopped."
        assert here.page.text_content(".badge") == "stopped"
    finally:
        server.gate.open()
    server.running.wait_idle()
    text = here.answers()[0]
    assert 2 <= len(text) < 200 and expected_text("never to end", 200).startswith(text)
    here.ask("and now", 8)
    here.wait()
    assert here.answers() == [expected_text("and now", 8)]


def test_an_empty_prompt_is_not_sent(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    here.ask("  ")
    assert "The prompt is empty" in (here.page.text_content("#error") or "")
    assert not any("chat" in url for url in here.urls)


# ---- errors ----


def test_a_server_with_a_key_asks_for_it(visit: Callable[..., Visit]) -> None:
    with serving(api_key="sesame") as served:
        here = visit(served.url)
        page = here.page
        page.wait_for_selector("#key-row:not([hidden])")
        assert (page.text_content("#error") or "").startswith("401: ")
        assert page.evaluate("document.activeElement.id") == "api-key"
        page.keyboard.type("wrong")
        here.ask("hello")
        here.wait()
        assert (page.text_content("#error") or "").startswith("401: ")
        page.fill("#api-key", "sesame")
        here.ask("hello", 8)
        page.wait_for_selector(".step")
        here.wait()
        assert here.answers() == [expected_text("hello", 8)]
        assert page.is_hidden("#error")
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage])").count("sesame") == 0
        here.context.close()


def test_errors_of_the_server_are_shown(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    here.ask("hello", 100_000)
    here.page.wait_for_selector("#error:not([hidden])")
    text = here.page.text_content("#error") or ""
    assert text.startswith("400: ") and "Parameter: max_tokens." in text and "256" in text
    assert here.page.text_content(".answer") == ""
    here.wait()
    here.ask("hello", 8)
    here.page.wait_for_selector(".step")
    assert here.page.is_hidden("#error")


def test_a_busy_server_says_when_to_try_again(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    error = {"error": {"message": "The queue is full.", "type": "server_error", "param": None, "code": "queue_full"}}
    here.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=503, headers={"Retry-After": "7"}, json=error),
    )
    here.ask("hello")
    here.page.wait_for_selector("#error:not([hidden])")
    assert here.page.text_content("#error") == "503: The queue is full.Try again in 7 s."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chunk("half"), "The stream ended before the answer did."),
        (chunk("half") + 'data: {"error": {"message": "The engine failed."}}\n\n', "200: The engine failed."),
    ],
)
def test_an_answer_that_breaks_off(server: Served, visit: Callable[..., Visit], body: str, message: str) -> None:
    here = visit(server.url)
    here.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    here.ask("hello")
    here.page.wait_for_selector("#error:not([hidden])")
    assert here.page.text_content("#error") == message
    assert here.answers() == ["half"]


def test_a_server_that_is_gone(visit: Callable[..., Visit]) -> None:
    with serving() as served:
        here = visit(served.url)
        here.page.wait_for_selector("#model option", state="attached")
        served.stop()
        here.ask("hello")
        here.page.wait_for_selector("#error:not([hidden])")
        assert "cannot be reached" in (here.page.text_content("#error") or "")


# ---- looks ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_does_not_scroll_sideways(server: Served, visit: Callable[..., Visit], scheme: str) -> None:
    here = visit(server.url, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    fits = "document.documentElement.scrollWidth <= 360"
    assert here.page.evaluate(fits)
    here.page.check("#compare")
    here.ask("on a small screen", 120)
    here.page.wait_for_selector("#verdict:not([hidden])")
    assert here.page.evaluate(fits)
    here.page.locator(".step").nth(1).tap()
    assert (here.page.text_content(".step-line") or "").startswith("step 2: ")
    assert here.page.evaluate(fits)


_CONTRAST = """
([ink, surface]) => {
  const style = getComputedStyle(document.documentElement);
  const luminance = (name) => {
    const value = style.getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16) / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const [low, high] = [luminance(ink), luminance(surface)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_text_is_aa(server: Served, visit: Callable[..., Visit], scheme: str) -> None:
    here = visit(server.url, color_scheme=scheme)
    text = [
        ("--ink", "--surface"), ("--ink", "--bg"), ("--ink", "--draft"), ("--ink", "--target"),
        ("--muted", "--surface"), ("--muted", "--bg"), ("--on-accent", "--accent"), ("--accent", "--surface"),
        ("--bad", "--bad-bg"), ("--bad", "--surface"), ("--good", "--surface"),
    ]  # fmt: skip
    shapes = [("--draft-line", "--draft"), ("--target-line", "--target"), ("--field", "--surface"), ("--focus", "--bg")]
    for pairs, least in ((text, 4.5), (shapes, 3.0)):
        for pair in pairs:
            assert here.page.evaluate(_CONTRAST, pair) >= least, pair


def test_dark_by_the_system_and_by_the_button(server: Served, visit: Callable[..., Visit]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = visit(server.url, color_scheme="light").page.evaluate(background)
    here = visit(server.url, color_scheme="dark")
    dark = here.page.evaluate(background)
    assert light != dark
    here.page.click("text=Light")
    assert here.page.evaluate(background) == light
    here.page.reload()
    assert here.page.evaluate(background) == light
    here.page.click("text=Dark")
    assert here.page.evaluate(background) == dark


def test_nothing_moves_for_those_who_ask_for_that(server: Served, visit: Callable[..., Visit]) -> None:
    style = """document.querySelector('.panel').classList.add('running'),
        getComputedStyle(document.querySelector('.panel'), '::before').animationName"""
    assert visit(server.url, reduced_motion="reduce").page.evaluate(style) == "none"
    assert visit(server.url).page.evaluate(style) == "swim"


def test_the_page_loads_nothing_from_elsewhere(server: Served, visit: Callable[..., Visit]) -> None:
    here = visit(server.url)
    here.ask("hello", 8)
    here.wait()
    assert here.urls and all(url.startswith(server.url) for url in here.urls)
    response = here.page.request.get(server.url)
    assert response.headers["content-security-policy"].startswith("default-src 'self'")
