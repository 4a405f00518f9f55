"""The server's page: who gets it, and the headers that it is sent with."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from fastapi.testclient import TestClient

from outrider.engine.engine import Engine
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.serve import page
from outrider.serve.app import Service, create_app
from outrider.serve.limits import Limits

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = {"authorization": "Bearer secret"}
VARIABLE = re.compile(r"(--[\w-]+): ([^;]+);")


def client(**options) -> TestClient:
    engine = Engine(ToyModel.random(8, 1, context_length=100), ToyTokenizer(8, [7]))
    return TestClient(create_app(Service(engine, "toy", **options)))


@pytest.fixture(scope="module")
def server():
    with client(drafter="ngram", limits=Limits(max_tokens=64)) as made:
        yield made


def test_browsers_get_the_page_and_programs_the_index(server):
    seen = server.get("/", headers=BROWSER)
    assert seen.headers["content-type"] == "text/html; charset=utf-8"
    assert seen.text.startswith("<!doctype html>")
    for accept in ("*/*", "application/json", ""):
        told = server.get("/", headers={"accept": accept})
        assert told.json()["name"] == "outrider"
        assert told.headers["vary"] == seen.headers["vary"] == "Accept"


def test_the_index_says_what_may_be_asked_for(server):
    told = server.get("/").json()
    assert told["model"] == "toy"
    assert told["context_tokens"] == 100
    assert told["drafters"] == ["none", "auto", "ngram", "suffix"]
    assert told["drafter"] == "ngram"
    assert told["rules"][0] == "auto"
    assert told["limits"]["max_tokens"] == 64
    body = {"model": "toy", "prompt": "ab", "max_tokens": 1, "temperature": 0}
    for name in told["drafters"]:
        asked = body | {"speculation": {"drafter": name}}
        assert server.post("/v1/completions", json=asked).status_code == 200
    for name in told["rules"]:
        asked = body | {"speculation": {"rule": name}}
        assert server.post("/v1/completions", json=asked).status_code == 200


def test_all_that_the_page_names_is_there_and_is_what_it_says(server):
    named = set(re.findall(r'(?:href|src)="(/[^"]+)"', server.get("/", headers=BROWSER).text))
    scripts = [file for file in files(page).iterdir() if file.name.endswith(".js")]
    named |= {
        page.FOLDER + name
        for file in scripts
        for name in re.findall(r'from "\./([^"]+)"', file.read_text())
    }
    assert {page.FOLDER + file.name for file in scripts} <= named  # none is left over
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for path in named:
        found = server.get(path)
        assert found.status_code == 200, path
        assert found.headers["content-type"] == f"{kinds[path.split('.')[-1]]}; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/page/style.css"])
def test_the_page_is_kept_to_itself(server, path):
    told = server.get(path, headers=BROWSER).headers
    assert "default-src 'self'" in told["content-security-policy"]
    assert "unsafe" not in told["content-security-policy"]
    assert told["x-content-type-options"] == "nosniff"
    assert told["referrer-policy"] == "no-referrer"


def test_the_page_has_nothing_that_the_policy_forbids():
    for file in files(page).iterdir():
        if file.name.endswith((".html", ".css", ".js")):
            text = file.read_text()
            assert not re.search(r"https?://|\bstyle=|\bon\w+=\"|<style|innerHTML", text), file.name
    html = files(page).joinpath("index.html").read_text()
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.S) == [""]


@pytest.mark.parametrize("name", ["__init__.py", "none.js", "..%2Fapp.py", "%2e%2e/app.py", ""])
def test_nothing_but_the_page_is_in_its_folder(server, name):
    response = server.get(page.FOLDER + name)
    assert response.status_code == 404
    assert "error" in response.json()


def test_the_page_loads_without_a_key_and_tells_nothing():
    with client(api_key="secret") as server:
        assert server.get("/", headers=BROWSER).status_code == 200
        assert server.get("/page/page.js").status_code == 200
        assert "toy" not in server.get("/", headers=BROWSER).text
        assert server.get("/").status_code == 401
        assert server.get("/v1/models", headers=BROWSER).status_code == 401
        assert server.get("/", headers=KEY).json()["model"] == "toy"


def test_its_colours_and_fonts_are_those_of_the_reports():
    def palettes(text):
        """On a light and on a dark screen; what comes behind them is for paper."""
        light, dark = re.findall(r":root \{(.*?)\}", text, re.S)[:2]
        return [dict(VARIABLE.findall(part)) for part in (light, dark)]

    ours = palettes(files(page).joinpath("style.css").read_text())
    folder = files("outrider.report")
    base, more = (
        palettes(folder.joinpath(name).read_text()) for name in ("base.html.j2", "measured.html.j2")
    )
    for turn in (0, 1):
        theirs = base[turn] | more[turn]
        assert ours[turn].pop("--on-good")
        assert ours[turn] == {name: theirs[name] for name in ours[turn]}


def test_a_chunk_says_what_its_round_drafted(server):
    how = {"model": "toy", "prompt": "abcabcabc", "max_tokens": 24, "temperature": 0, "seed": 1}
    on = {"speculation": {"drafter": "ngram", "draft_length": 3}, "stream": True}
    lines = server.post("/v1/completions", json=how | on).text.split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    ours = [choice["outrider"] for chunk in told for choice in chunk["choices"]]
    rounds = [one for one in ours if "round" in one]
    (trace,) = [one["trace"] for one in ours if "trace" in one]
    totals = {
        "drafted": "drafted_tokens",
        "accepted": "accepted_tokens",
        "corrections": "correction_tokens",
        "bonuses": "bonus_tokens",
    }
    for name, total in totals.items():
        assert sum(one["round"][name] for one in rounds) == trace[total]
    assert trace["drafted_tokens"] > 0
    assert len(rounds) == trace["target_calls"]
    for one in rounds:
        emitted = [one["round"][name] for name in ("accepted", "corrections", "bonuses")]
        assert len(one["tokens"]) == sum(emitted)
