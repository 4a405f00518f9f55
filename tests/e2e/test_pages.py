"""The pages in a real browser: quiet, offline, as wide as a phone, usable by keyboard."""

from __future__ import annotations

import base64

import pytest

from outrider.audit.exact import audit_exact
from outrider.core.processors import Sampling
from outrider.engine.engine import Engine
from outrider.lab.plan import Acceptance, Machine, Side, make_plan
from outrider.report.audit import audit_page
from outrider.report.bench import bench_page, comparison_page
from outrider.report.page import write_page
from outrider.report.plan import plan_page
from tests.e2e.browser import Browser, find_chromium
from tests.simulated import CONFIGURATIONS, write_log

EVIL = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
LONG = "model:/a/very/long/path/to/a/draft/model/that/has/no/place/to/break#tree=4,2,1"
PHONE, TABLET, DESK = 390, 1000, 1280

WIDER = """(width => [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > width + 1 && !e.closest(".scroll, svg");
}).map(e => e.tagName + "." + e.className))"""
SMALLEST = """Math.min(...[...document.querySelectorAll("svg.picture")].filter(s => s.clientWidth)
  .flatMap(s => [...s.querySelectorAll("text")].map(t =>
    parseFloat(getComputedStyle(t).fontSize) * s.clientWidth / s.viewBox.baseVal.width)))"""
CONTRAST = """(() => {
  const parts = c => c.match(/[0-9.]+/g).map(Number);
  const light = c => parts(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if ((parts(c)[3] ?? 1) === 1) return c;
    }
    return "rgb(255, 255, 255)";
  };
  const low = new Set();
  for (const e of document.querySelectorAll("body *:not(svg *)")) {
    const words = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!words || !e.getClientRects().length) continue;
    const pair = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) low.add(e.tagName + "." + e.className);
  }
  return [...low];
})()"""
SHOWN = """[...document.querySelectorAll("details.text")].filter(d => !d.hidden)
  .map(d => d.querySelector("summary").innerText + "\\n" + d.querySelector(".output").innerText)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed here")
    with Browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    ways = {**CONFIGURATIONS, LONG: CONFIGURATIONS["eagle"]}
    del ways["model:small"]
    how = {"kinds": {"code": 0.7, "chat": 0.4}, "prompts": 6, "tokens": 40, "configurations": ways}
    first = write_log(folder / "a.jsonl", {"target": EVIL}, pieces=(EVIL, "x" * 300), **how)
    second = write_log(folder / "b.jsonl", {"target": LONG}, noise=2, **how)
    engine = Engine.load("toy:vocab=3", drafter="ngram", rule="rejection")
    hot = Sampling(temperature=1.0)
    result = audit_exact(engine, [[0], [1]], max_tokens=2, sampling=hot).to_dict() | {
        "target": EVIL, "drafter": LONG, "rule": "rejection", "prompts": [EVIL, "x" * 300],
        "samples": 1, "max_tokens": 2, "sampling": hot.to_dict(), "seed": 1, "sentence": "Said.",
    }  # fmt: skip
    made = {
        "bench": bench_page(first, command=EVIL),
        "comparison": comparison_page(first, second, names=(EVIL, LONG)),
        "audit": audit_page(result),
        "plan": plan_page(
            make_plan(
                Acceptance(0.8),
                1 / 8,
                machine=Machine(9e11, 1e14),
                target=Side(7e9, 1.4e10, 1e5),
                draft=Side(1e9, 2e9, 1e4),
            ),
            command=EVIL + "x" * 300,
        ),
    }
    for name, html in made.items():
        write_page(folder / f"{name}.html", html)
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize(
    ("width", "dark"), [(PHONE, False), (PHONE, True), (TABLET, False), (DESK, False), (DESK, True)]
)
@pytest.mark.parametrize("name", ["bench", "comparison", "audit", "plan"])
def test_pages_are_quiet_offline_legible_and_fit(browser, pages, name, width, dark):
    tab = browser.open(pages[name], width=width, dark=dark)
    assert tab.evaluate("document.title").startswith("Outrider ")  # no text has run as a script
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(f"{WIDER}({width})") == []
    assert tab.evaluate(SMALLEST) >= 8
    assert tab.evaluate(CONTRAST) == []
    assert tab.evaluate("document.querySelectorAll('h1').length") == 1
    assert tab.complaints == []
    assert tab.requests == []


def test_the_selects_change_the_text_by_keyboard(browser, pages):
    tab = browser.open(pages["bench"], width=DESK)
    (before,) = tab.evaluate(SHOWN)
    assert "code · " in before
    assert EVIL in before
    tab.evaluate("document.querySelector('#choose select').focus()")
    tab.press("ArrowDown")
    (after,) = tab.evaluate(SHOWN)
    assert after.splitlines()[0] != before.splitlines()[0]
    assert tab.evaluate("document.querySelector('#choose select').selectedIndex") == 1
    tab.press("Tab")
    tab.press("End")
    (plain,) = tab.evaluate(SHOWN)
    assert "· plain" in plain
    assert tab.evaluate("document.querySelectorAll('details:not([hidden]) .accepted').length") == 0


def test_a_wide_table_scrolls_in_its_own_box(browser, pages):
    tab = browser.open(pages["bench"], width=PHONE)
    inner, outer, focusable = tab.evaluate(
        "(b => [b.scrollWidth, b.clientWidth, b.tabIndex])(document.querySelector('.scroll'))"
    )
    assert inner > outer
    assert outer < PHONE
    assert focusable == 0


def test_the_table_of_configurations_is_whole_on_a_tablet(browser, pages):
    tab = browser.open(pages["bench"], width=TABLET)
    inner, outer = tab.evaluate(
        "(b => [b.scrollWidth, b.clientWidth])(document.querySelector('.arms').parentElement)"
    )
    assert inner <= outer


def test_without_scripts_every_text_can_be_opened(browser, pages):
    tab = browser.open(pages["bench"], width=DESK, scripts=False)
    document = tab.call("DOM.getDocument", depth=0)["root"]["nodeId"]

    def count(selector):
        return len(tab.call("DOM.querySelectorAll", nodeId=document, selector=selector)["nodeIds"])

    assert count("form[hidden]") == 1
    assert count("details.text") > 8
    assert count("details.text[hidden]") == 0
    assert count("details.text[open]") == 1


def test_it_prints(browser, pages):
    tab = browser.open(pages["bench"], width=DESK)
    paper = base64.b64decode(tab.call("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF")
    assert 2 <= paper.count(b"/Type /Page\n") <= 12
