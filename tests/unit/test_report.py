"""The page of an audit: every form of result, hostile texts, and a file that is whole or absent."""

from __future__ import annotations

import json
import re

import pytest

from outrider.audit.exact import audit_exact
from outrider.audit.sampled import audit_samples
from outrider.core.processors import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.errors import UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.report.audit import audit_page, write_page
from tests.contract.test_exact_laws import NoResidual

HOT = Sampling(temperature=1.0)
EVIL = "<script>alert('x')</script>"
HEAD = {
    "target": "toy:vocab=3",
    "drafter": "model",
    "rule": "rejection",
    "prompts": ["a & b", f"{EVIL}\n\u202e\ud800"],
    "samples": 60,
    "max_tokens": 2,
    "sampling": HOT.to_dict(),
    "seed": 5,
    "sentence": f"A sentence with {EVIL}.",
}
TEXTS = {0: EVIL, 1: " \n$\\frac{", 2: "日本" * 9}


def engine(rule):
    return Engine(
        ToyModel.random(3, 1, sharpness=1.0),
        ToyTokenizer(3),
        drafter=ModelDrafter(ToyModel.random(3, 37, sharpness=2.0)),
        rule=rule,
        draft_length=2,
    )


def enumerated(rule="rejection"):
    report = audit_exact(engine(rule), [[0], [1]], max_tokens=2, sampling=HOT)
    return {**HEAD, **report.to_dict()}


def sampled():
    report = audit_samples(
        engine("rejection"),
        [[0], [1]],
        60,
        seed=5,
        request={"max_tokens": 2, **HOT.to_dict()},
        looks=2,
    )
    return {**HEAD, **report.to_dict()}


def compared():
    differences = [
        {
            "prompt": 0, "seed": 7, "position": 1, "plain_token": 0, "token": token,
            "top_2_gap": 0.25, "pair_gap": gap, "near_tie": tie,
        }
        for token, gap, tie in ((1, -0.25, True), (2, 3.0, False), (None, None, False))
    ]  # fmt: skip
    return {
        **HEAD, "method": "tokens", "verdict": "different", "compared": 24, "compared_tokens": 48,
        "threshold": 0.5, "needed": 8, "differences": differences,
    }  # fmt: skip


def of_endpoints():
    result = {k: v for k, v in sampled().items() if k not in ("target", "drafter", "rule")}
    return result | {
        "method": "endpoints",
        "endpoint": "http://127.0.0.1:1/v1",
        "against": "http://127.0.0.1:2/v1",
        "names": {str(token): text for token, text in TEXTS.items()},
        "requests": 123,
        "logprobs": {"compared": 7, "largest_difference": 0.0125},
    }


def inexact():
    return {**HEAD, "method": "none", "verdict": "not exact by design"}


@pytest.fixture(scope="module")
def results():
    walked = enumerated()
    return {
        "enumeration": walked,
        "different": enumerated(NoResidual()),
        "broken": walked
        | {
            "verdict": "different", "largest_difference": None, "total_variation": None,
            "worst": None, "broken": "Noise was used twice.", "laws": [],
        },
        "samples": sampled(),
        "tokens": compared(),
        "all equal": compared() | {"verdict": "consistent", "needed": None, "differences": []},
        "endpoints": of_endpoints(),
        "none": inexact(),
    }  # fmt: skip


FORMS = (
    "enumeration",
    "different",
    "broken",
    "samples",
    "tokens",
    "all equal",
    "endpoints",
    "none",
)


@pytest.fixture(scope="module")
def pages(results):
    return {
        form: audit_page(
            results[form], texts=TEXTS, versions={"torch": "2 <b>"}, command=f"outrider {EVIL}"
        )
        for form in FORMS
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_page_has_all_that_it_should_and_nothing_that_it_should_not(form, pages, results):
    page, result = pages[form], results[form]
    assert f"<span>{result['verdict'].capitalize()}</span></h1>" in page
    assert "What could not be seen" in page
    assert "torch" in page
    for comparison in result.get("comparisons", ()):
        assert f">{comparison['name']}</td>" in page
    # Hostile texts are text; the one script of the page would be a foreign one.
    assert "<script" not in page
    assert "&lt;script&gt;alert" in page
    assert "2 <b>" not in page
    # Prompts do not turn the page's writing; the raw data may hold what it was given.
    assert "\u202e" not in page.partition("<section>\n<h2>The data")[0]
    assert not re.search(r"\bpass(es|ed)?\b", page, re.IGNORECASE)
    # Nothing is loaded from anywhere.
    for target in re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""", page):
        assert target.startswith(("#", "data:application/json;base64,"))
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "@import" not in page


@pytest.mark.parametrize("form", FORMS)
def test_pictures_do_not_clash(form, pages):
    page = pages[form]
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    pictures = re.findall(r"<svg[^>]*>", page)
    assert bool(pictures) == (form not in ("broken", "none"))
    assert all('role="img"' in svg and 'aria-label="' in svg for svg in pictures)
    assert "<style type" not in page
    assert "#0" not in "".join(re.findall(r'style="([^"]*)"', page))


def test_a_page_is_the_same_each_time(pages, results):
    again = audit_page(
        results["samples"], texts=TEXTS, versions={"torch": "2 <b>"}, command=f"outrider {EVIL}"
    )
    assert again == pages["samples"]


def test_the_data_can_be_had_back(pages, results):
    import base64

    (packed,) = re.findall(r'base64,([^"]+)"', pages["samples"])
    assert json.loads(base64.b64decode(packed)) == json.loads(json.dumps(results["samples"]))


def test_words_where_they_belong(pages, results):
    assert "seeded noise itself" in pages["enumeration"]
    assert "Looks</h3>" in pages["samples"]
    assert "Most at odds at" in pages["samples"]
    assert "logprobs largest difference" in pages["endpoints"]
    assert "127.0.0.1:2" in pages["endpoints"]
    assert "near-tie" in pages["tokens"]
    assert "No output parts" in pages["all equal"]
    assert "⟨end⟩" in pages["tokens"]
    single = results["samples"] | {
        "looks": [{"samples": 60, "alpha": results["samples"]["alpha"], "verdict": "consistent"}]
    }
    assert "Looks</h3>" not in audit_page(single)


def test_endpoints_at_temperature_0_have_differences_and_no_tests(results):
    dropped = {"comparisons", "looks", "alpha", "plain_samples", "speculative_samples", "worst"}
    dropped |= {"needed", "seed"}
    greedy = {k: v for k, v in results["endpoints"].items() if k not in dropped} | {
        "verdict": "different",
        "compared": 2,
        "differences": [
            {"prompt": 0, "position": 4, "plain": EVIL, "speculative": "b\n", "gap": None}
        ],
    }
    page = audit_page(greedy)
    assert "Where answers part" in page
    assert "2 answers of each" in page
    assert "<script" not in page


def test_many_prompts_leave_pictures_out_and_say_so(monkeypatch, results):
    monkeypatch.setattr("outrider.report.audit._MOST", 3)
    page = audit_page(results["samples"])
    assert "3 more pictures are left out" in page


def test_what_no_audit_made_is_refused():
    with pytest.raises(UsageError, match="No page can be made"):
        audit_page({**inexact(), "verdict": "fine"})


def test_a_page_is_written_whole_or_not_at_all(tmp_path, pages):
    place = tmp_path / "page.html"
    write_page(place, pages["none"])
    write_page(str(place), pages["samples"])
    assert place.read_text(encoding="utf-8") == pages["samples"]
    with pytest.raises(UsageError, match="does not exist"):
        write_page(tmp_path / "nowhere" / "page.html", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        write_page(tmp_path / "folder", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "page.html"]
