"""The server's page in a real browser: chats, comparisons, and the explanation in numbers."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider import Engine
from outrider.drafters.model import ModelDrafter
from outrider.models.hf import HFModel
from outrider.models.tokenizer import HFTokenizer
from tests.e2e.browser import Browser, Tab, find_chromium
from tests.e2e.test_pages import CONTRAST, DESK, WIDER
from tests.small_models import new_module
from tests.tokenizers_for_tests import new_byte_level

uvicorn = pytest.importorskip("uvicorn", reason="a server needs uvicorn")

from outrider.serve.app import Service, create_app  # noqa: E402

PHONE = 360
KEY = "sécret"
WAIT_S = 60


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed here")
    with Browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


def new_service(**options) -> Service:
    """A small model with a chat template, and a draft model that is often of its opinion."""
    words = new_byte_level()
    module = new_module("llama", vocab_size=len(words))
    near = copy.deepcopy(module)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = near.get_output_embeddings().weight
        head.data += 0.05 * torch.randn_like(head)
    drafter = ModelDrafter(HFModel(near))
    engine = Engine(HFModel(module), HFTokenizer(words), drafter=drafter)
    return Service(engine, "small", drafter="near", **options)


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Its address, while it runs in a thread."""
    config = uvicorn.Config(create_app(service), port=0, log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until = time.monotonic() + WAIT_S
    while not server.started:
        assert time.monotonic() < until
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def service():
    return new_service()


@pytest.fixture(scope="module")
def address(service):
    with serving(service) as found:
        yield found


def fill(tab: Tab, **values: object) -> None:
    """The settings of the chat."""
    for name, value in values.items():
        tab.evaluate(
            f"document.getElementById('options').elements.{name}.value = {json.dumps(value)}"
        )


def say(tab: Tab, text: str) -> None:
    """Type a message and send it by keyboard."""
    tab.evaluate("document.getElementById('prompt').focus()")
    tab.call("Input.insertText", text=text)
    tab.press("Enter")


def chat(browser: Browser, address: str, width: int = DESK) -> Tab:
    tab = browser.open(f"{address}/#chat", width=width)
    tab.wait_until("!document.getElementById('ask').hidden")
    return tab


ENDED = "document.querySelector('.answer')?.ariaBusy === 'false'"
TOKENS = """[...document.querySelectorAll('.answer > .output > .token')]
  .map(t => [t.classList[1], t.textContent, Number(t.dataset.round)])"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("view", ["chat", "exact"])
def test_it_is_quiet_legible_and_fits(browser, address, view, width, dark):
    tab = browser.open(f"{address}/#{view}", width=width, dark=dark)
    tab.wait_until("document.getElementById('about').textContent.startsWith('small')")
    if view == "exact":
        tab.evaluate("document.querySelector('#draws button').click()")
        tab.wait_until("document.querySelector('#draws [role=status]').textContent !== ''")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(f"{WIDER}({width}).filter(e => !e.includes('unseen'))") == []
    assert tab.evaluate(CONTRAST) == []
    headings = "[...document.querySelectorAll('h1')].filter(h => h.offsetHeight).length"
    assert tab.evaluate(headings) == 1
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(address)] == []


def test_a_chat_streams_tokens_by_origin_and_rounds(browser, address, service):
    tab = chat(browser, address)
    fill(tab, max_tokens=48, draft_length="4")
    say(tab, "the the the in the")
    tab.wait_until(ENDED)
    expected = service.engine.generate(
        [{"role": "user", "content": "the the the in the"}],
        max_tokens=48, temperature=0.0, draft_length=4, seed=1,
    )  # fmt: skip
    shown = tab.evaluate(TOKENS)
    assert "".join(text for _, text, _ in shown) == expected.text
    assert {origin for origin, _, _ in shown} == set(expected.origins)
    assert set(expected.origins) == {"accepted", "correction", "bonus"}
    rounds = expected.trace.rounds
    assert tab.evaluate("document.querySelectorAll('.column').length") == len(rounds)
    facts = tab.evaluate("document.querySelector('.facts').innerText")
    summary = expected.trace.summary()
    assert f"{summary['tokens_per_target_call']:.2f}" in facts
    assert f"{round(100 * summary['acceptance_rate'])} %" in facts
    # The keyboard goes from round to round, and its tokens light up.
    tab.evaluate("document.querySelector('.strip').focus()")
    tab.press("Home")
    told = tab.evaluate("document.querySelector('.round-told').textContent")
    assert told.startswith(f"Round 1: {rounds[0].drafted or 'nothing'} drafted")
    number = shown[-1][2]  # a round whose bytes make no character yet has nothing to light up
    for key in ["End", *["ArrowLeft"] * (len(rounds) - number)]:
        tab.press(key)
    lit = tab.evaluate("[...document.querySelectorAll('.token.lit')].map(t => t.dataset.round)")
    assert set(lit) == {str(number)}
    say(tab, "again")
    tab.wait_until("document.querySelectorAll('.answer[aria-busy=false]').length === 2")
    assert tab.complaints == []


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_comparison_has_both_speeds_and_equal_texts(browser, address, temperature):
    tab = chat(browser, address)
    fill(tab, max_tokens=32, temperature=temperature)
    tab.evaluate("document.getElementById('compare').click()")
    say(tab, "the in the")
    tab.wait_until("document.querySelector('.comparison')?.dataset.same !== undefined")
    assert tab.evaluate("document.querySelector('.comparison').dataset.same") == "true"
    told = tab.evaluate("document.querySelector('.comparison').innerText")
    assert "token for token" in told
    assert told.count("tokens/s") == 2
    assert "1.00 per target call" in told


def test_texts_that_differ_are_told_apart(browser, address):
    tab = chat(browser, address)
    tab.evaluate(
        """window.told = null, import('/page/compare.js').then(({verdict}) => {
          const run = (ids, rule) => ({tokens: ids.map(id => ({id})), rule});
          window.told = [[1, 2], [1, 3], [1]].map(ids => verdict(run([1, 2], 'block'), run(ids)));
        }), 0"""
    )
    tab.wait_until("window.told !== null")
    told = tab.evaluate("window.told")
    assert [one["same"] for one in told] == [True, False, False]
    assert "Rule block keeps the law" in told[1]["text"]


def test_stop_frees_the_place(browser, address, service, monkeypatch):
    score = service.engine.model.score

    def slowly(*given):
        time.sleep(0.05)
        return score(*given)

    monkeypatch.setattr(service.engine.model, "score", slowly)
    tab = chat(browser, address)
    fill(tab, max_tokens=400, drafter="none", temperature=1)
    say(tab, "go on")
    tab.wait_until("document.querySelectorAll('.column').length > 1")
    assert not service.scheduler.idle
    tab.press("Escape")
    tab.wait_until(ENDED)
    assert "stopped" in tab.evaluate("document.querySelector('.note.end').textContent")
    until = time.monotonic() + WAIT_S
    while not service.scheduler.idle:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert tab.evaluate("document.querySelectorAll('.column').length") < 400
    assert tab.evaluate("document.getElementById('send').hidden") is False


def test_errors_are_told_as_they_are_worded(browser, address):
    tab = chat(browser, address)
    fill(tab, rule="greedy", temperature=1)
    say(tab, "the")
    tab.wait_until("!document.getElementById('problem').hidden")
    told = tab.evaluate("document.getElementById('problem').textContent")
    assert "greedy" in told
    assert "temperature 0" in told
    # The message is back where it can be changed, and nothing of it is left in the conversation.
    assert tab.evaluate("document.getElementById('prompt').value") == "the"
    assert tab.evaluate("document.querySelectorAll('.turn').length") == 0


def test_a_key_is_asked_for_and_kept_in_the_tab(browser):
    with serving(new_service(api_key=KEY)) as address:
        tab = browser.open(f"{address}/", width=DESK)
        tab.wait_until("!document.getElementById('key').hidden")
        for key in ("wrong", KEY):
            tab.evaluate("document.getElementById('key-input').focus()")
            tab.call("Input.insertText", text=key)
            tab.press("Enter")
            if key == "wrong":
                tab.wait_until(
                    "document.getElementById('key-problem').textContent.includes('not take')"
                )
        tab.wait_until("!document.getElementById('ask').hidden")
        fill(tab, max_tokens=4)
        say(tab, "the")
        tab.wait_until(ENDED)
        assert tab.evaluate(TOKENS)
        assert tab.evaluate("localStorage.length + document.cookie.length") == 0


# --- why it is exact -----------------------------------------------------------------------------

ROWS = """Object.fromEntries([...document.querySelectorAll('.sums tbody tr')].map(r => [
  r.querySelector('th b').textContent,
  [...r.querySelectorAll('td')].map(c => Number(c.innerText.split('=').pop()))]))"""
P, Q = [50, 30, 20], [60, 10, 30]


@pytest.fixture
def exact(browser, address):
    return browser.open(f"{address}/#exact", width=DESK)


def test_the_numbers_at_first(exact):
    assert exact.evaluate(ROWS) == {
        "target": [*P, 100],
        "draft": [*Q, 100],
        "kept": [50, 10, 20, 80],
        "surplus": [10, 0, 10, 20],
        "missing": [0, 20, 0, 20],
        "repair": [0, 100, 0, 100],
        "comes out": [*P, 100],
    }
    assert exact.evaluate("document.querySelector('.headline').innerText").startswith("80 %")


def test_the_sliders_keep_their_sum_and_what_comes_out_is_p(exact):
    exact.evaluate("document.querySelector('.side.q input').focus()")
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft", "Tab", "ArrowUp", "Home", "Tab"):
        exact.press(key)
        rows = exact.evaluate(ROWS)
        assert rows["draft"][-1] == sum(rows["draft"][:3]) == 100
        assert rows["comes out"] == rows["target"] == [*P, 100]
    first = exact.evaluate(ROWS)["target"][0]
    box = exact.evaluate(
        "(b => [b.left, b.top, b.width, b.height])"
        "(document.querySelector('.side.p input').getBoundingClientRect())"
    )
    left, top, width, height = box
    at = {"y": top + height / 2, "button": "left", "clickCount": 1}
    exact.call("Input.dispatchMouseEvent", type="mousePressed", x=left + width / 2, **at)
    for x in (0.6, 0.7, 0.8):
        move = at | {"buttons": 1}
        exact.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * x, **move)
        rows = exact.evaluate(ROWS)
        assert sum(rows["target"][:3]) == 100
        assert rows["comes out"] == rows["target"]
    exact.call("Input.dispatchMouseEvent", type="mouseReleased", x=left + width * 0.8, **at)
    assert exact.evaluate(ROWS)["target"][0] > first + 20


def test_every_pair_of_laws_comes_out_as_p(exact):
    exact.evaluate(
        """window.worst = null, import('/page/law.js').then(module => {
          const {generator, parts, rebalance, sum} = module;
          let worst = 0;
          const random = generator(7), law = () => {
            let made = [34, 33, 33];
            for (let i = 0; i < 3; i++) made = rebalance(made, i, 130 * random() - 10);
            return made;
          };
          for (let i = 0; i < 2000; i++) {
            const [p, q] = [law(), law()], {out, accepted, rejected} = parts(p, q);
            const tv = sum(p.map((x, k) => Math.abs(x - q[k]))) / 2;
            const whole = [...p, ...q].every(x => Number.isInteger(x) && x >= 0);
            if (sum(p) !== 100 || sum(q) !== 100 || !whole) worst = Infinity;
            worst = Math.max(worst, Math.abs(accepted - 100 + tv), Math.abs(rejected - tv),
              ...out.map((x, k) => Math.abs(x - p[k])));
          }
          window.worst = String(worst);
        }), 0"""
    )
    exact.wait_until("window.worst !== null")
    assert float(exact.evaluate("window.worst")) < 1e-9


STEP = """[document.querySelector('#round .told').innerText,
  [...document.querySelectorAll('#round .word')].map(w => w.classList[1]),
  document.querySelector('#round .steps').innerText]"""


def test_a_round_step_by_step(exact):
    click = (
        "[...document.querySelectorAll('#round button')].find(b => b.innerText === '{}').click()"
    )
    endings = set()
    for _ in range(4):
        seen = []
        while not seen or not exact.evaluate("document.querySelector('#round .main').disabled"):
            if seen:
                exact.evaluate(click.format("Next"))
            seen.append(exact.evaluate(STEP))
        kinds = seen[-1][1]
        rejected = "dropped" in kinds
        own = "correction" if rejected else "bonus"
        endings.add(own)
        assert kinds == ["given", *["accepted"] * kinds.count("accepted"), own,
                         *["dropped"] * kinds.count("dropped")]  # fmt: skip
        assert kinds.count("accepted") + kinds.count("dropped") == 3
        emitted = kinds.count("accepted") + 1
        assert seen[-1][0].startswith(f"{emitted} word{'s' * (emitted > 1)} from one pass")
        # A draft is rejected when its u is not below p / q, and at the first one it ends.
        judged = [text for text, _, _ in seen if "The drawn u is" in text]
        assert [text.endswith("kept.") for text in judged] == [True] * kinds.count("accepted") + [
            False
        ] * rejected
        exact.evaluate(click.format("Back"))
        assert exact.evaluate(STEP) == seen[-2]
        exact.evaluate(click.format("Play again"))
        assert exact.evaluate(STEP)[2].startswith("Step 1 of")
    assert endings == {"correction", "bonus"}


def test_ten_thousand_draws_tell_the_rule_from_the_wrong_ones(exact):
    exact.evaluate("document.querySelector('#draws button').click()")
    exact.wait_until("document.querySelector('#draws [role=status]').textContent !== ''")
    assert "10,000" in exact.evaluate("document.querySelector('#draws [role=status]').textContent")
    told = exact.evaluate(
        """Object.fromEntries([...document.querySelectorAll('.way')].map(w => [w.dataset.way,
          [w.classList[1], [...w.querySelectorAll('tbody .num:not(.goal)')]
            .map(c => parseFloat(c.innerText))]]))"""
    )
    # The laws of the three ways; five standard errors of 10,000 draws are below 2.5 points.
    laws = {"exact": P, "keep": Q, "resample": [60, 16, 24]}
    for way, (verdict, shares) in told.items():
        assert verdict == ("good" if way == "exact" else "bad")
        for share, expected in zip(shares, laws[way], strict=True):
            assert abs(share - expected) < 2.5
