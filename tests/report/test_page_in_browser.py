"""The report page in a browser: what it looks like can only be seen there.

Needs the Chromium of the system and the `playwright` package, which drives it.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.report.page import render as page
from tests.report import story_examples as examples

api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium: none of {', '.join(NAMES)} is on the PATH")

WIDTHS = {"desktop": 1280, "phone": 390}
THEMES = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}
STORIES = ("story", "on_a_cpu", "twelve_runs", "hostile_numbers")

#: What is wrong with a page as it stands, one sentence each.
FAULTS = """() => {
  const faults = [], right = document.documentElement.clientWidth + 0.5;
  const shown = element => element.checkVisibility({checkVisibilityCSS: true}) && !element.closest('.unseen, .skip, [hidden]');
  const name = element => element.tagName + ' ' + element.className + ' ' + element.textContent.trim().slice(0, 40);
  if (document.documentElement.scrollWidth > document.documentElement.clientWidth)
    faults.push('the page is wider than the window: ' + document.documentElement.scrollWidth);
  for (const image of document.images)
    if (!image.naturalWidth) faults.push('a picture is missing: ' + image.getAttribute('src'));
  for (const figure of document.querySelectorAll('figure')) {
    const pictures = [...figure.querySelectorAll('svg[role=img]')].filter(shown);
    if (pictures.length !== 1) faults.push(pictures.length + ' pictures are shown in ' + figure.className);
    for (const picture of pictures) {
      const box = picture.getBoundingClientRect();
      if (box.width < 300 || box.height < 60) faults.push('a picture is too small in ' + figure.className);
      for (const mark of picture.querySelectorAll('text')) {
        const place = mark.getBoundingClientRect();
        if (place.right > right || place.left < -0.5 || place.top < box.top - 8 || place.bottom > box.bottom + 8)
          faults.push('text is cut off in ' + figure.className + ': ' + mark.textContent);
        if (parseFloat(getComputedStyle(mark).fontSize) * box.width / picture.viewBox.baseVal.width < 10.5)
          faults.push('text is too small in ' + figure.className + ': ' + mark.textContent);
      }
    }
  }
  const whole = 'h1, h2, h3, p, li, dt, dd, pre, summary, article, .numbers th, .numbers td';
  for (const element of document.querySelectorAll(whole)) {
    const place = element.getBoundingClientRect();
    if (shown(element) && (place.right > right || place.left < -0.5)) faults.push('it is cut off: ' + name(element));
  }
  return faults;
}"""


@functools.cache
def small_page() -> str:
    return page.render(examples.two_runs())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=STORIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    page.write(path, getattr(examples, request.param)())
    return path


class Visit:
    """A page that is open, and what the browser complained of."""

    def __init__(self, browser: Any, path: Path, width: int, theme: str) -> None:
        self.complaints: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self._note(request.url, path))
        self.page.goto(path.as_uri())

    def _note(self, url: str, path: Path) -> None:
        if url != path.as_uri() and not url.startswith("data:"):
            self.complaints.append(f"it asked for {url}")

    def faults(self) -> list[str]:
        return [*self.complaints, *self.page.evaluate(FAULTS)]

    def close(self) -> None:
        self.page.context.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_the_page_has_no_fault(browser, path, width, theme):
    visit = Visit(browser, path, width, theme)
    assert visit.faults() == []
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == THEMES[theme]
    assert visit.page.evaluate("document.title") != "taken"
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert visit.faults() == []
    visit.close()


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ('<img src="missing.png">', "a picture is missing: missing.png"),
        ("<script>undefined_name()</script>", "console: "),
        ('<link rel="stylesheet" href="https://fonts.example/a.css">', "console: "),
        ('<div style="width: 1500px; height: 1px"></div>', "the page is wider than the window"),
        ('<p style="position: fixed; left: -20px">over the edge</p>', "it is cut off: P"),
        ("<style>.wide, .narrow { display: block !important }</style>", "2 pictures are shown in verdicts"),
        ("<style>.wide, .narrow { display: none !important }</style>", "0 pictures are shown in verdicts"),
        ("<style>.wide text, .narrow text { font-size: 60px !important }</style>", "text is cut off in verdicts"),
        ("<style>.wide text, .narrow text { font-size: 9px !important }</style>", "text is too small in verdicts"),
    ],
)
def test_a_planted_fault_is_found(browser, tmp_path, planted, fault):
    path = tmp_path / "report.html"
    path.write_text(small_page().replace("</main>", f"{planted}</main>"), encoding="utf-8")
    visit = Visit(browser, path, WIDTHS["phone"], "light")
    assert any(found.startswith(fault) for found in visit.faults()), visit.faults()
    visit.close()


def test_the_keyboard_reaches_the_verdict_first_and_opens_the_numbers(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(small_page(), encoding="utf-8")
    visit = Visit(browser, path, WIDTHS["desktop"], "light")
    visit.page.keyboard.press("Tab")
    skip = visit.page.locator(":focus")
    assert skip.inner_text() == "Skip to the verdict"
    assert skip.bounding_box()["x"] >= 0  # it can be seen while it has the focus
    visit.page.keyboard.press("Enter")
    assert visit.page.evaluate("location.hash") == "#verdict"
    visit.page.locator("figure.verdicts summary").focus()
    visit.page.keyboard.press("Enter")
    assert visit.page.locator("figure.verdicts table").is_visible()
    visit.close()


def test_the_table_of_numbers_stays_a_table_on_a_phone(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(small_page(), encoding="utf-8")
    for width in WIDTHS.values():
        visit = Visit(browser, path, width, "light")
        table = visit.page.locator(".numbers").get_by_role("table")
        assert table.get_by_role("row").count() == 3
        assert table.get_by_role("rowheader").all_inner_texts()[1].strip() == "bf16-true"
        assert table.get_by_role("cell").count() == 8
        visit.close()


def test_paper_is_light_and_has_every_picture(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(small_page(), encoding="utf-8")
    visit = Visit(browser, path, 800, "dark")
    visit.page.emulate_media(media="print", color_scheme="dark")
    # text is smaller on paper than on a screen
    assert [fault for fault in visit.faults() if not fault.startswith("text is too small")] == []
    assert visit.page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    visit.close()
