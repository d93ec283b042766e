"""The pages in a real browser: curves that grow, galleries, ratings by key, phones, the dark."""

import json
import threading
from contextlib import contextmanager

import pytest
import uvicorn

from mmrl.apps.view.command import listening
from mmrl.apps.view.folders import Runs
from mmrl.apps.view.pairs import Pairs
from mmrl.apps.view.server import application
from mmrl.monitoring.report.page import write_report
from tests.fixtures.chromium import browser
from tests.view.runs import metrics, picture_run, text_run

NARROW, WIDE = 390, 1280
# elements that stick out of the page, and are not in a box that scrolls
OUTSIDE = """() => [...document.querySelectorAll('main *')].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, pre')
    && e.checkVisibility()).map(e => e.tagName + ' ' + (e.textContent || '').slice(0, 40))"""
# texts whose colour is too close to their ground (WCAG: 4.5, of small texts)
FAINT = """() => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => {
    v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (c !== 'rgba(0, 0, 0, 0)') return c; }
    return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() &&
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).filter((e) => {
      const style = getComputedStyle(e);
      const colour = e.namespaceURI.endsWith('svg') ? style.fill : style.color;
      const [a, b] = [light(colour), light(ground(e))].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05) < 4.5; }).map((e) => e.textContent.slice(0, 40)); }"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture
def opened(chromium):
    """Open a page; its complaints, and requests to anywhere else, fail the test."""
    contexts = []
    problems = []

    def visit(address, width=WIDE, scheme="light"):
        context = chromium.new_context(
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            has_touch=width == NARROW,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a script ran: {dialog.message}"))
        local = ("http://127.0.0.1", "data:", "file:")
        page.on("request", lambda r: r.url.startswith(local) or problems.append(r.url))
        page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not [text for text in problems if "ERR_CONNECTION_REFUSED" not in text]


@contextmanager
def serving(*places, rate=None):
    runs = Runs(places)
    app = application(runs, Pairs(runs, rate) if rate else None)
    listener = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def until(page, expression):
    """Wait until an expression is true; playwright's own waiting needs eval, which pages forbid."""
    for _ in range(2400):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}")


def append(run, *lines):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_curves_grow_while_the_reader_looks(tmp_path, opened):
    run = picture_run(tmp_path / "run", 6, finished=False)
    with serving(run) as address:
        page = opened(address)
        (section,) = page.locator("[data-part=reward]").all()
        assert page.title().startswith("(1) run")  # an alarm
        page.locator("summary", has_text="Configuration").click()  # closed by the reader
        length = "document.querySelector('[data-part=reward] .line').getAttribute('points').length"
        before = page.evaluate(length)
        append(run, *({"iteration": i, **metrics(i)} for i in range(7, 30)))
        until(page, f"{length} > {before} + 100")
        assert section.is_visible()
        assert page.locator("details", has_text="Configuration").get_attribute("open") is None
        assert "iteration 29 of 60" not in page.content()  # no training holds the folder
        page.locator("[data-part=reward] svg").first.hover()
        assert "reward" in page.locator(".tip").first.inner_text()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it looks at once
    until(page, "document.getElementById('connection').textContent.includes('stopped')")


def rated(count):
    return f"document.getElementById('progress').textContent.startsWith('{count} rated')"


def test_a_person_rates_by_touch_and_keys(tmp_path, opened):
    file = tmp_path / "ratings.jsonl"
    picture_run(tmp_path / "runs" / "a")
    text_run(tmp_path / "runs" / "b")
    with serving(tmp_path / "runs", rate=file) as address:
        page = opened(f"{address}/rate", NARROW)
        for count, key in enumerate("120", start=1):
            until(page, "!busy && number")
            assert not page.evaluate(OUTSIDE)
            page.locator(".side").first.tap() if key == "1" else page.keyboard.press(key)
            until(page, rated(count))
        until(page, "!busy")
        page.keyboard.press("u")
        until(page, rated(2))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    rewards = [[answer["reward"] for answer in record["answers"]] for record in records]
    assert rewards == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(("width", "scheme"), [(NARROW, "light"), (WIDE, "dark")])
def test_every_page_fits_and_can_be_read(tmp_path, opened, width, scheme):
    picture_run(tmp_path / "runs" / "a")
    text_run(tmp_path / "runs" / "b")
    staged = tmp_path / "staged"
    picture_run(staged / "1-sft")
    (staged / "config.yaml").write_text("stages:\n  sft: {}\n")
    reports = [write_report(folder).as_uri() for folder in (tmp_path / "runs" / "a", staged)]
    with serving(tmp_path / "runs", rate=tmp_path / "r.jsonl") as address:
        paths = ("/", "/runs/a", "/runs/b", "/rate")
        for place in (*reports, *(address + path for path in paths)):
            page = opened(place, width, scheme)
            if place.endswith("/rate"):
                until(page, "!busy && number")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, place
            assert not page.evaluate(OUTSIDE), place
            assert not page.evaluate(FAINT), place
