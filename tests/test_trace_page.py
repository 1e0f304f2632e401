"""A trace's page in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traces
from playwright.sync_api import Browser, Page, expect, sync_playwright

from specmeta import trace
from specmeta.status import Status
from specmeta.trace.page import make_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Nothing that the browser would do by itself on a network.
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
NUMBERS = (*trace.file.REQUIRED, "committed_len")
OPEN = 120_000  # milliseconds; a busy machine needs some of them


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("SPECMETA_REQUIRE_BROWSER") == "1":
            pytest.fail("no chromium, and SPECMETA_REQUIRE_BROWSER=1")
        pytest.skip("no chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Opened:
    """A page in the browser. It must stay silent, and ask nobody for anything."""

    def __init__(self, browser: Browser, file: Path, scheme: Any = "light") -> None:
        self.page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=scheme)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = file.as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready]", timeout=OPEN)

    def close(self) -> None:
        self.page.close()
        assert self.messages == []
        assert self.requests == [self.url]


@pytest.fixture
def run(tmp_path: Path) -> trace.Trace:
    """Some rows in their prompt, rewinds, hand-overs and a fault."""
    return trace.read(traces.write(tmp_path / "run.jsonl", traces.STEPS))


@pytest.fixture
def opened(browser: Browser, tmp_path: Path, run: trace.Trace) -> Iterator[Page]:
    (tmp_path / "page.html").write_text(make_page(run))
    opened = Opened(browser, tmp_path / "page.html")
    yield opened.page
    opened.close()


def tip(page: Page) -> dict[str, str]:
    """What is shown at the pointer, by name; the heading under its own."""
    names, values = (page.locator(f"#tip {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return {"title": page.locator("#tip b").inner_text(), **dict(zip(names, values, strict=True))}


def point_at_row(page: Page, step: int, lane: int) -> None:
    cell, height, first = page.evaluate("[state.cell, timeline.lane, state.window]")
    x, y = (step - first + 0.5) * cell, (lane + 0.5) * height
    page.locator("#timeline").hover(position={"x": x, "y": y})


def page_centre(page: Page, number: int) -> dict[str, float]:
    cell, columns = page.evaluate("[map.cell, map.columns]")
    return {"x": (number % columns + 0.4) * cell, "y": (number // columns + 0.4) * cell}


def show_step(page: Page, step: int) -> None:
    page.get_by_role("slider", name="Step").fill(str(step))
    expect(page.locator("#step")).to_have_text(re.compile(f"^{step} of "))
    first = page.evaluate("step => data.first[step]", step)
    expect(page.locator("#rows tr").first).to_have_attribute("data-row", str(first))


def test_the_whole_run(opened: Page) -> None:
    summary = opened.locator("#summary").inner_text().split("\n")
    pairs = dict(zip(summary[::2], summary[1::2], strict=True))
    assert pairs == {
        "steps": "3",
        "rows": "6",
        "requests": "3",
        "tokens": "5",
        "target passes": "2",
        "tokens a pass": "1.50",
        "acceptance": "33.33% (1/3 tokens)",
        "acceptance by position": "100.0% 0.0% 0.0%",
        "tokens given up": "2",
        "rewinds over a page": "1",
        "pages handed over": "1",
        "pages held twice": "0",
        "faults": "OVERFLOW in 1 rows",
        "page size": "4",
    }
    assert opened.locator("#summary .bad").all_inner_texts() == ["OVERFLOW in 1 rows"]


def test_hover_tells_each_rows_numbers(opened: Page, run: trace.Trace) -> None:
    for step in range(run.num_steps):
        for row in range(run.first[step], run.first[step + 1]):
            point_at_row(opened, step, int(run["slot"][row]))
            shown = tip(opened)
            value = {name: int(run[name][row]) for name in NUMBERS}
            assert shown["title"] == f"Step {step}, row {row - run.first[step]}"
            assert shown["slot"] == str(value["slot"])
            assert shown["request"] == str(value["request"])
            assert shown["length"] == f"{value['seq_len']}, {value['committed_len']} committed"
            numbers = re.match(r"(\d+).* behind (\d+) cached", shown["query tokens"])
            assert numbers
            assert numbers.groups() == (str(value["query_len"]), str(value["cached_len"]))
            assert shown["accepted"] == f"{run['accepted'][row]} of {run['drafts'][row]}"
            ids = [" ".join(map(str, lists.of(row))) for lists in (run.draft_tokens, run.emitted)]
            assert [shown.get("drafts", ""), shown.get("emitted", "")] == ids
            assert shown["pages used"] == str(value["used_pages"])
    assert tip(opened)["status"] == "OVERFLOW"
    assert opened.evaluate("faultNames(8 + 64 + 1)") == Status.words(8 + 64 + 1)
    assert opened.evaluate("faultNames(0)") == ""
    point_at_row(opened, 1, 0)
    assert tip(opened)["given up"] == "2 tokens, 1 page"
    assert tip(opened)["query tokens"] == "4 (1 certain, 3 drafts), behind 6 cached"


def test_hover_tells_who_has_a_page(opened: Page) -> None:
    show_step(opened, 1)
    pages = opened.locator("#pages")
    pages.hover(position=page_centre(opened, 5))
    assert tip(opened) == {
        "title": "Page 5 at step 1",
        "request": "0",
        "place": "3 of its pages, used, given up in this step",
        "since": "step 0",
    }
    show_step(opened, 2)
    pages.hover(position=page_centre(opened, 1))
    pages.hover(position=page_centre(opened, 5))
    assert tip(opened) == {
        "title": "Page 5 at step 2",
        "request": "1",
        "place": "2 of its pages, used",
        "since": "step 2",
        "handed over": "from request 0",
    }
    pages.hover(position=page_centre(opened, 7))
    assert tip(opened)["place"] == "1 of its pages, allocated"
    pages.hover(position=page_centre(opened, 4))
    assert tip(opened)["held"] == "by nobody"
    expect(opened.locator("#events")).to_have_text(
        "4 pages used of 5 allocated. Handed over: page 5 from request 0 to 1."
    )


def test_pages_have_their_requests_colours(opened: Page) -> None:
    show_step(opened, 2)
    width, pixels = opened.locator("#pages").evaluate(
        "c => [c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]"
    )

    def colour(page: int) -> tuple[int, ...]:
        x, y = (round(value + 4) for value in page_centre(opened, page).values())
        return tuple(pixels[4 * (y * width + x) :][:4])

    assert colour(1) == colour(2)  # request 0
    assert colour(3) == colour(5)  # request 1
    assert len({colour(page) for page in (1, 3, 4, 7)}) == 4  # 4 is free, 7 is not used


def test_the_table_has_the_steps_rows(opened: Page, run: trace.Trace) -> None:
    for step in (2, 0, 1):
        show_step(opened, step)
        rows = [line.split("\t") for line in opened.locator("#rows").inner_text().split("\n")]
        for row, cells in enumerate(rows, int(run.first[step])):
            names = ("slot", "request", "cached_len", "query_len")
            assert cells[1:5] == [str(run[name][row]) for name in names]
            names = ("drafts", "accepted", "seq_len", "committed_len", "used_pages")
            assert cells[6:11] == [str(run[name][row]) for name in names]
        assert len(rows) == run.first[step + 1] - run.first[step]


def test_keys(opened: Page) -> None:
    step, keys = opened.locator("#step"), opened.keyboard
    for key, shown in (
        ("ArrowRight", 1),
        ("End", 2),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("Home", 0),
        ("Shift+ArrowRight", 2),
        ("PageUp", 0),
        ("PageDown", 2),
        ("p", 1),
        ("n", 2),
    ):
        keys.press(key)
        expect(step).to_have_text(f"{shown} of 2")
    expect(opened.locator("#found")).to_have_text(
        "1 rows with a fault, 1 pages handed over in step 2."
    )
    keys.press("Home")
    keys.press("ArrowDown")
    expect(opened.locator("#chosen")).to_contain_text("Request 0: slot 0, steps 0 to 1, 3 tokens")
    keys.press("ArrowDown")
    expect(opened.locator("#chosen")).to_contain_text("Request 1: slot 1, steps 0 to 2")
    expect(opened.locator("#rows tr[aria-selected]")).to_have_count(1)
    keys.press("Escape")
    expect(opened.locator("#rows tr[aria-selected]")).to_have_count(0)
    keys.press("?")
    expect(opened.get_by_role("dialog", name="Keys")).to_be_visible()
    keys.press("Escape")
    expect(opened.get_by_role("dialog")).to_be_hidden()
    keys.press("/")
    expect(opened.get_by_role("searchbox")).to_be_focused()
    # In the search, keys are text.
    opened.keyboard.type("step 1 n")
    expect(step).to_have_text("0 of 2")


@pytest.mark.parametrize(
    ("query", "step", "found"),
    [
        ("request 2", 2, "Request 2: slot 2, steps 2 to 2, 0 tokens."),
        ("1", 0, "Request 1: slot 1, steps 0 to 2, 2 tokens."),
        ("page 7", 2, "Page 7, from step: 2 request 2."),
        ("P5", 0, "Page 5, from step: 0 request 0, 2 request 1."),
        ("step 1", 1, "Step 1."),
        ("step 3", 0, "No step 3: the last is 2."),
        ("request 3", 0, "No request 3: they are 0 to 2."),
        ("page 4", 0, "No request had page 4."),
        ("page 99", 0, "No request had page 99."),
        ("emma", 0, "Expected a request, a page or a step: request 3, page 40, step 12."),
    ],
)
def test_find(opened: Page, query: str, step: int, found: str) -> None:
    box = opened.get_by_role("searchbox", name="Find a request, a page or a step")
    box.fill(query)
    box.press("Enter")
    expect(opened.locator("#found")).to_have_text(found)
    expect(opened.locator("#step")).to_have_text(f"{step} of 2")


def test_find_again_goes_on(opened: Page) -> None:
    box = opened.get_by_role("searchbox")
    box.fill("page 5")
    for step, request in ((0, 0), (2, 1), (0, 0)):
        box.press("Enter")
        expect(opened.locator("#step")).to_have_text(f"{step} of 2")
        assert opened.evaluate("[state.request, state.page]") == [request, 5]


def test_clicks(opened: Page) -> None:
    point_at_row(opened, 1, 1)
    cell = opened.evaluate("state.cell")
    opened.locator("#timeline").click(position={"x": 1.5 * cell, "y": 30})
    expect(opened.locator("#step")).to_have_text("1 of 2")
    expect(opened.locator("#chosen")).to_contain_text("Request 1")
    opened.locator("#pages").click(position=page_centre(opened, 1))
    expect(opened.locator("#events")).to_contain_text("Page 1, from step: 0 request 0.")
    expect(opened.locator("#chosen")).to_contain_text("Request 0")
    opened.locator("#run").click(position={"x": 5, "y": 5})
    expect(opened.locator("#step")).to_have_text("0 of 2")
    opened.get_by_role("button", name="One step on").click()
    opened.get_by_role("combobox", name="next").select_option("fault")
    opened.get_by_role("button", name="Next mark").click()
    expect(opened.locator("#step")).to_have_text("2 of 2")
    opened.get_by_label("lanes").select_option("rows")
    assert opened.evaluate("lanes[state.lanes]") == 2


def test_everything_has_a_name(opened: Page) -> None:
    nameless = opened.evaluate(
        """[...document.querySelectorAll('button, input, select, canvas, section')]
          .filter((e) => !e.ariaLabel && !e.getAttribute("aria-labelledby")
                         && !e.textContent.trim() && !e.labels?.length)
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    opened.keyboard.press("Tab")
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def background(page: Page) -> int:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_light_and_dark(browser: Browser, tmp_path: Path, run: trace.Trace) -> None:
    (tmp_path / "page.html").write_text(make_page(run))
    for scheme, other in (("light", "dark"), ("dark", "light")):
        opened = Opened(browser, tmp_path / "page.html", scheme)
        page = opened.page
        assert (background(page) > 3 * 128) == (scheme == "light")
        before = page.evaluate("colours.accepted")
        page.get_by_role("button", name=other).click()
        assert (background(page) > 3 * 128) == (other == "light")
        assert page.evaluate("colours.accepted") != before
        page.keyboard.press("t")
        assert page.evaluate("colours.accepted") == before
        opened.close()


def test_a_file_that_was_cut_off(browser: Browser, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "run.jsonl", traces.STEPS)
    path.write_bytes(path.read_bytes()[:-9])
    (tmp_path / "page.html").write_text(make_page(trace.read(path)))
    opened = Opened(browser, tmp_path / "page.html")
    expect(opened.page.locator("#note")).to_have_text(
        "Note: line 4 is incomplete and was left out."
    )
    opened.close()


def test_a_large_run(browser: Browser, tmp_path: Path) -> None:
    """Ten thousand steps of 256 rows. The times are printed (pytest -s)."""
    run = traces.large(10_000, 256)
    (tmp_path / "page.html").write_text(make_page(run))
    size = (tmp_path / "page.html").stat().st_size
    begun = time.monotonic()
    opened = Opened(browser, tmp_path / "page.html")
    page = opened.page
    opening = time.monotonic() - begun
    print(f"\n{run.num_rows} rows, {size / 1e6:.1f} MB: opened in {opening:.1f} s")
    assert opening < 30
    seconds, steps = page.evaluate(
        """async () => {
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          const begun = performance.now();
          for (let i = 1; i <= 50; i++) {
            slider.value = i * 199;
            slider.dispatchEvent(new Event("input"));
            await frame();
          }
          return [(performance.now() - begun) / 1000, 50];
        }"""
    )
    print(f"{steps} moves of the slider: {seconds / steps * 1000:.0f} ms each")
    assert seconds / steps < 0.5
    show_step(page, 7777)
    row = int(run.first[7777]) + 100
    assert page.locator("#rows tr").count() == 256
    cells = page.locator("#rows tr").nth(100).locator("td").all_inner_texts()
    assert cells[2] == str(run["request"][row])
    point_at_row(page, 7777, 100)
    assert tip(page)["length"] == f"{run['seq_len'][row]}, {run['committed_len'][row]} committed"
    box = page.get_by_role("searchbox")
    box.fill(f"request {run['request'][5_000 * 256]}")
    box.press("Enter")
    expect(page.locator("#found")).to_contain_text(f"Request {run['request'][5_000 * 256]}: slot 0")
    for _ in range(6):
        page.get_by_role("button", name="Fewer steps").click()
    opened.close()
