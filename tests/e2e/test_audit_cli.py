"""``outrider audit`` as a user meets it."""

from __future__ import annotations

import json

import pytest

from outrider.cli.main import main
from outrider.registry import RULES
from tests.controls import NoResidual
from tests.servers import ToyServer, toy_engine

TOY = ["audit", "--target", "toy:vocab=4,seed=3", "--drafter", "model:toy:vocab=4,seed=9"]
SAMPLED = [*TOY, "--sampled", "--seed", "1", "-n", "2", "-k", "2"]
CONTROLS = "tests.controls"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    found = capsys.readouterr()
    return left.value.code, found.out, found.err


@pytest.fixture
def rules(monkeypatch):
    """Two rules that are wrong on purpose, and one that says so, in the table of rules."""
    entries = RULES._entries()
    monkeypatch.setitem(entries, "wrong", f"{CONTROLS}:NoResidual")
    monkeypatch.setitem(entries, "shared", f"{CONTROLS}:SharedNoise")
    monkeypatch.setitem(entries, "inexact", "tests.e2e.test_audit_cli:Inexact")


class Inexact(RULES.load("rejection")):
    name = "inexact"
    exact = False


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_a_toy_is_walked(capsys, rule):
    code, out, _ = run(capsys, *TOY, "--rule", rule, "-n", "2", "--json")
    result = json.loads(out)
    assert (code, result["verdict"], result["method"]) == (0, "consistent", "enumeration")
    assert result["largest_difference"] <= 1e-12
    assert result["courses"] > 16 == result["outputs"]
    assert result["rule"] == rule
    assert result["drafter"] == "model"


def test_the_sentence_says_what_was_tested_and_what_was_not(capsys):
    code, out, _ = run(capsys, *TOY, "--rule", "rejection", "-n", "2")
    assert code == 0
    assert out.startswith("Consistent: all ")
    assert "courses of chance were walked" in out
    assert "not tested" in out


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ("wrong", []),
        ("shared", []),
        ("wrong", ["--sampled", "--samples", "1500", "--seed", "2"]),
    ],
)
def test_a_wrong_rule_is_different(capsys, rules, rule, how):
    code, out, _ = run(capsys, *TOY, "--rule", rule, "-n", "2", *how)
    assert code == 1
    assert "Different: " in out


def test_samples_of_a_toy(capsys):
    code, out, _ = run(
        capsys, *SAMPLED, "--rule", "rejection", "--samples", "6000", "--json", "--prompt", "ab"
    )
    result = json.loads(out)
    assert (code, result["verdict"]) == (0, "consistent")
    assert [c["name"] for c in result["comparisons"]] == [
        "position 1", "position 2", "positions 1-2",
    ]  # fmt: skip
    assert result["plain_samples"] == result["speculative_samples"] == 6000
    assert result["prompts"] == ["ab"]


def test_too_few_samples(capsys):
    code, out, err = run(capsys, *SAMPLED, "--rule", "rejection", "--samples", "50")
    assert code == 3
    assert "Not enough samples: " in out
    assert "needed" in out
    assert "positions 1-2" in out
    assert err == ""


def test_the_coupled_rule_is_compared_token_by_token(capsys):
    code, out, _ = run(capsys, *SAMPLED, "--samples", "40", "--json")
    result = json.loads(out)
    assert (code, result["method"], result["compared"]) == (0, "tokens", 40)
    code, out, _ = run(capsys, *SAMPLED, "--samples", "4")
    assert (code, out[:19]) == (3, "Not enough samples:")


def test_an_inexact_rule_is_never_certified(capsys, rules):
    code, out, _ = run(capsys, *TOY, "--rule", "inexact", "--json")
    assert (code, json.loads(out)["verdict"]) == (1, "not exact by design")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "9"], "at most 256 are walked"),
        (["--alpha", "2"], "--alpha must be between 0 and 1"),
        (["--prompt", ""], "A prompt is empty"),
        (["--rule", "rejectoin"], "Did you mean 'rejection'?"),
        (["--top-p", "0"], "top_p must be"),
        (["--samples", "0"], "--samples"),
    ],
)
def test_mistakes_are_told_plainly(capsys, arguments, words):
    code, out, err = run(capsys, *TOY, *arguments)
    assert code == 2
    assert words in err
    assert out == ""


# --- looks, pages and servers --------------------------------------------------------------------


def test_a_sequential_audit_says_where_it_stopped(capsys, rules):
    code, out, _ = run(
        capsys, *SAMPLED, "--rule", "wrong", "--samples", "3200", "--sequential", "--json"
    )
    result = json.loads(out)
    assert (code, result["verdict"]) == (1, "different")
    assert result["plain_samples"] == result["looks"][-1]["samples"] < 3200


@pytest.mark.parametrize(
    "how",
    [
        ["--rule", "rejection"],
        ["--rule", "wrong"],
        ["--rule", "shared"],
        ["--rule", "inexact"],
        ["--rule", "rejection", "--sampled", "--samples", "40"],
        ["--sampled", "--samples", "40"],
    ],
    ids=" ".join,
)
def test_every_audit_can_be_a_page(capsys, rules, tmp_path, how):
    pytest.importorskip("matplotlib")
    page = tmp_path / "audit.html"
    _, out, err = run(capsys, *TOY, "-n", "2", "--html", str(page), *how)
    text = page.read_text()
    verdict = text.split('class="verdict"')[-1] if 'class="verdict"' in text else text
    assert out.split(":")[0].splitlines()[-1] in verdict
    assert str(page) in err
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_that_cannot_be_written_is_told_before_anything_is_drawn(capsys, tmp_path):
    code, out, err = run(capsys, *TOY, "--html", str(tmp_path / "no" / "audit.html"))
    assert (code, out) == (2, "")
    assert "does not exist" in err


def test_contexts_can_be_remembered(capsys, tmp_path):
    page = tmp_path / "audit.html"
    code, out, _ = run(
        capsys, *TOY, "--rule", "rejection", "--remember", "--samples", "300", "-n", "2", "--json",
        "--html", str(page),
    )  # fmt: skip
    assert "no context was scored twice" in page.read_text()
    result = json.loads(out)
    assert (code, result["method"], result["remembered"]) == (3, "samples", True)


# --- enumeration of a target that is no toy, or is treated as none -------------------------------

WALKED = [*TOY, "--enumerate", "--remember", "-n", "2"]


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_a_remembered_target_is_walked(capsys, tmp_path, rule):
    page = tmp_path / "audit.html"
    how = ["--rule", rule, "--html", str(page), "--prompt", "ab", "--prompt", "b" * 70]
    code, out, _ = run(capsys, *WALKED, *how, "--json")
    result = json.loads(out)
    assert (code, result["method"], result["remembered"]) == (0, "enumeration", True)
    assert result["courses"] > result["outputs"] == 32
    assert result["drafted_tokens"] > 0
    for told in (
        "Consistent: all ", f"{result['courses']} courses of chance were walked, ",
        f"{result['drafted_tokens']} drafted tokens, over 32 outputs of at most 2 tokens of "
        f"'toy-3' after 'ab', '{'b' * 60}…'; ", "own cache was not tested", "other prompts",
    ):  # fmt: skip
        assert told in result["sentence"]
    text = page.read_text()
    assert "each context’s scored once" in text
    assert "no context was scored twice" in text
    assert "a toy’s are exact" not in text
    # A toy's own sentence and page are as they were.
    code, out, _ = run(capsys, *TOY, "--enumerate", "-n", "2", *how)
    assert (code, "own cache" in out, "a toy’s are exact" in page.read_text()) == (0, False, True)


def test_a_wrong_rule_is_different_on_a_remembered_target(capsys, rules):
    code, out, _ = run(capsys, *WALKED, "--rule", "wrong")
    assert code == 1
    assert out.startswith("Different: all ")
    assert "of 'toy-3' after 'aaa'" in out
    code, out, _ = run(capsys, *WALKED, "--rule", "shared")
    assert (code, "Noise was used twice" in out) == (1, True)


def test_a_walk_of_a_lookup_that_never_drafted_tested_nothing(capsys):
    code, out, _ = run(
        capsys, "audit", "--target", "toy:vocab=26,seed=3", "-d", "ngram", "--prompt", "abc",
        "-n", "1", "--rule", "rejection", "--enumerate", "--remember",
    )  # fmt: skip
    assert (code, out[:14]) == (3, "Nothing tested")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sampled"], "got --sampled"),
        (["--sequential"], "got --sequential"),
        (["--ray"], "got --ray"),
        (["--endpoint", "http://a", "--against", "http://b"], "got --endpoint"),
        (["--remember", "-n", "6"], "were reached at token"),
    ],
)
def test_what_cannot_be_enumerated_is_told_plainly(capsys, arguments, words):
    code, out, err = run(capsys, *TOY, "--rule", "rejection", "--enumerate", *arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.model
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_the_default_model_is_walked(capsys, rule):
    code, out, _ = run(
        capsys, "audit", "--enumerate", "--rule", rule, "-d", "eagle#chain", "-n", "2",
        "--temperature", "1", "--top-k", "2", "--json",
    )  # fmt: skip
    result = json.loads(out)
    assert (code, result["verdict"], result["outputs"]) == (0, "consistent", 4)
    assert result["largest_difference"] <= result["tolerance"] == 1e-12
    assert result["drafted_tokens"] > 0
    assert "'smollm2-135m' after 'Monday is good." in result["sentence"]


def test_an_audit_without_a_draft_says_so(capsys):
    code, out, _ = run(capsys, "audit", "--target", "toy:vocab=3", "-d", "none", "-n", "2")
    assert code == 0
    assert "Nothing was drafted" in out


@pytest.mark.parametrize(("rule", "verdict"), [("rejection", 3), (NoResidual(), 1)])
def test_two_servers(capsys, tmp_path, rule, verdict):
    page, log = tmp_path / "servers.html", tmp_path / "answers.jsonl"
    with (
        ToyServer(toy_engine(), plain=True) as plain,
        ToyServer(toy_engine(rule), plain=False) as ours,
    ):
        command = [
            "audit", "--endpoint", ours.url, "--against", plain.url, "--prompt", "ab",
            "--samples", "600", "-n", "2", "--seed", "1", "--log", str(log), "--html", str(page),
        ]  # fmt: skip
        code, out, _ = run(capsys, *command)
        assert code == verdict
        assert "1200 requests were sent" in out
        # Run again, it has all answers and asks nothing.
        code, out, _ = run(capsys, *command, "--json")
    result = json.loads(out)
    assert (code, result["requests"], result["resumed"]) == (verdict, 0, 1200)
    assert result["method"] == "endpoints"
    assert "position 1" in page.read_text()


def test_one_server_is_not_enough(capsys):
    code, _, err = run(capsys, "audit", "--endpoint", "http://127.0.0.1:1")
    assert code == 2
    assert "--against" in err


@pytest.mark.parametrize("how", [["--rule", "rejection"], ["--temperature", "0"]])
def test_an_audit_in_which_nothing_was_drafted_tested_nothing(how, capsys, tmp_path):
    """A lookup finds nothing to say after a prompt of letters that do not come again."""
    page = tmp_path / "page.html"
    idle = ["audit", "--target", "toy:vocab=26,seed=3", "--drafter", "ngram", "--prompt", "abc"]
    code, out, _ = run(capsys, *idle, "-n", "1", "--samples", "40", *how, "--html", str(page))
    assert code == 3
    assert out.startswith("Nothing tested")
    assert "A fixed --draft-length" in out
    assert "Nothing tested" in page.read_text()
    code, out, _ = run(capsys, *idle, "-n", "1", "--samples", "40", *how, "--draft-length", "2")
    assert code == 3
    assert "A fixed --draft-length" not in out
    code, out, _ = run(capsys, *idle, "-n", "1", "--drafter", "none", "--samples", "40", *how)
    assert code in (0, 3)
    assert "Nothing tested" not in out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--target", "/no/such/model.gguf"],
        ["--target", "no-such-name-xyz"],
        ["--rule", "nosuch"],
        ["--samples", "0"],
        ["--html", "/no/such/folder/page.html"],
    ],
)
def test_an_error_is_no_verdict(capsys, wrong):
    code, out, err = run(capsys, *TOY, "-n", "2", *wrong)
    assert code == 2
    assert not out
    assert err.strip()


def test_whoever_gave_no_seed_is_told_it(capsys, tmp_path, monkeypatch):
    """So that what was drawn can be drawn again: on the terminal, and in the page's command."""
    page = tmp_path / "page.html"
    asked = [*TOY, "--sampled", "--samples", "40", "-n", "2", "-k", "2", "--html", str(page)]
    monkeypatch.setattr("sys.argv", ["outrider", *asked])
    _, _, err = run(capsys, *asked)
    seed = err.partition("To repeat it: --seed ")[2].split()[0]
    assert f"--seed {seed}" in page.read_text()
    _, _, err = run(capsys, *asked, "--seed", "5")
    assert "To repeat it" not in err


def test_the_record_names_what_ran(capsys):
    _, out, _ = run(capsys, *TOY, "-n", "2", "-k", "2", "--json")
    result = json.loads(out)
    assert (result["draft_length"], result["runtime"]) == ("2", "ToyModel")
