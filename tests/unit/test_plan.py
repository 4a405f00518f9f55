"""Plans: closed forms by hand and by simulation, measurement on toys, the command, the page."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider.cli.main import app, main
from outrider.core.price import Price
from outrider.core.theory import (
    best_draft_length,
    cache_bytes_per_token,
    quoted_speedup,
    roofline_s,
    speedup,
    speedup_of_request,
    tokens_by_depth,
    tokens_per_call,
)
from outrider.core.trace import Round
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.errors import UsageError
from outrider.lab.plan import (
    ALPHAS,
    RATIOS,
    Acceptance,
    Drafting,
    Machine,
    Side,
    make_plan,
    survival,
)
from outrider.lab.plan_wording import assumptions, headline, sentences
from outrider.lab.probe import Depths, draft_times, pass_seconds, probe, run_beside_plain
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.report.plan import plan_page

SEVEN = Side(7e9, 14e9, 131072)
CARD = Machine(900e9, 100e12)

probabilities = st.floats(0, 1)
costs = st.floats(0.001, 2)


def outcome(*arguments):
    """Exit code and standard output of the command, errors turned to messages as ``main`` does."""
    return CliRunner().invoke(app, ["plan", *arguments])


def told(*arguments):
    result = outcome(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def simulated(alpha, length, rounds=200_000):
    """Tokens of each round: drafted tokens up to the first rejection, and the target's own."""
    stood = np.random.default_rng(7).random((rounds, length)) < alpha
    tokens = 1 + np.cumprod(stood, axis=1).sum(axis=1)
    return tokens.mean(), tokens.std() / np.sqrt(rounds)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("length", [1, 4, 20])
def test_expected_tokens_are_those_of_independent_draws(alpha, length):
    mean, error = simulated(alpha, length)
    assert tokens_per_call(alpha, length) == pytest.approx(mean, abs=5 * error + 1e-12)


def test_the_speed_up_is_that_of_a_simulated_run():
    """A clock that goes through 200 000 rounds, against one that decodes as many tokens plainly."""
    alpha, length, ratio = 0.8, 4, 8
    mean, error = simulated(alpha, length)
    clock = length / ratio + 1
    found = speedup(tokens_per_call(alpha, length), length / ratio)
    assert found == pytest.approx(mean / clock, abs=5 * error / clock)


def test_the_quoted_form_and_the_true_one_at_the_well_known_place():
    assert quoted_speedup(0.8, 4, 8) == pytest.approx(2.8)  # 4.2 / 1.5
    assert tokens_per_call(0.8, 4) == pytest.approx(3.3616)
    assert speedup(3.3616, 0.5) == pytest.approx(2.241, abs=5e-4)
    assert quoted_speedup(0.8, 20, 8) == pytest.approx(17 / 3.5)  # even so not five times 2.8


def test_five_times_the_draft_is_less_and_the_words_say_why():
    plan = make_plan(Acceptance(0.8), 1 / 8, chosen=4, longest=20)
    four, twenty = plan.points[4], plan.points[20]
    assert twenty.speedup == pytest.approx(4.95388 / 3.5, abs=1e-4)
    assert twenty.speedup < four.speedup < 5 * twenty.speedup
    said = " ".join(sentences(plan))
    assert "says 2.80 at γ = 4; 2.24 is expected" in said
    assert "a rejected token ends the run" in said
    assert "A draft of 20, 5 times as long as 4, gives 1.42, not 5 · 2.24 = 11.21" in said
    assert "no length gives more than 1/(1 − α) = 5.00" in said


@given(probabilities, st.integers(0, 40), st.floats(0.1, 100))
def test_the_quoted_form_never_understates(alpha, length, ratio):
    true = speedup(tokens_per_call(alpha, length), length / ratio)
    quoted = quoted_speedup(alpha, length, ratio)
    assert quoted >= true - 1e-12
    if length <= 1:
        assert quoted == pytest.approx(true)


@given(probabilities, costs, st.integers(1, 30))
def test_the_best_length_is_that_of_the_closed_form(alpha, cost, longest):
    drafting = Drafting(Acceptance(alpha), cost)
    best = drafting.best(longest)
    assert best.draft_length == best_draft_length(alpha, cost, longest)
    assert all(best.speedup >= drafting.at(length).speedup for length in range(longest + 1))


@given(probabilities, costs)
def test_the_first_token_pays_from_its_cost_on(alpha, cost):
    at = Drafting(Acceptance(alpha), cost).at(1)
    assert (at.speedup > 1) == (1 + alpha > 1 + cost)


@given(st.lists(probabilities, max_size=6), probabilities)
def test_equal_rates_by_depth_are_one_rate(rates, alpha):
    assert tokens_by_depth([alpha] * 5) == pytest.approx(tokens_per_call(alpha, 5))
    assert 1 <= tokens_by_depth(rates) <= 1 + len(rates)


def test_rates_by_depth_and_the_common_one_behind_them():
    acceptance = Acceptance(0.5, rates=(0.9, 0.4))
    assert survival(acceptance, 4) == pytest.approx([0.9, 0.36, 0.18, 0.09])
    assert acceptance.tokens(4) == pytest.approx(1 + 0.9 + 0.36 + 0.18 + 0.09)


def test_what_was_not_proposed_is_neither_drafted_nor_scored():
    """Half of the rounds propose one token, a quarter two: means over rounds of 0, 1 or 2."""
    price = Price.measured({1: 1.0, 2: 1.5, 3: 3.0})
    acceptance = Acceptance(0.5, proposed=(0.5, 0.25))
    assert acceptance.drafted(2) == 0.75
    assert acceptance.verify(2, price) == pytest.approx(0.5 * 1.0 + 0.25 * 1.5 + 0.25 * 3.0)
    plan = make_plan(acceptance, 0.1, price=price, start=0.2, rest=0.3, longest=2)
    expected = 1.75 * 1.3 / (0.2 + 0.1 * 0.75 + 1.625 + 0.3)
    assert plan.points[2].speedup == pytest.approx(expected)
    assert plan.points[0].speedup == 1.0


def test_a_price_of_rows_shortens_the_best_draft():
    flat = make_plan(Acceptance(0.8), 0.05)
    steep = make_plan(Acceptance(0.8), 0.05, price=Price.measured({1: 1.0, 2: 1.2, 8: 2.4}))
    assert steep.best.draft_length < flat.best.draft_length
    assert steep.points[3].verify == pytest.approx(1.6)


def test_amdahl():
    assert speedup_of_request(3.0, 0.6) == pytest.approx(1 / (0.4 + 0.2))
    assert speedup_of_request(3.0, 0.0) == 1.0
    plan = make_plan(Acceptance(0.8), 1 / 8, decode_share=0.8)
    assert dict(plan.shares)[0.8] == pytest.approx(1 / (0.2 + 0.8 / plan.best.speedup))
    assert "5 is the most that any draft could" in " ".join(sentences(plan))


def test_roofline_by_hand():
    # 14 GB at 900 GB/s, and 2 · 7e9 operations a row at 100 T/s: 15.56 ms against 0.14 ms.
    assert roofline_s(1, 14e9, 14e9, 900e9, 100e12) == pytest.approx(14 / 900)
    assert roofline_s(200, 14e9, 14e9, 900e9, 100e12) == pytest.approx(0.028)
    assert CARD.balance_rows(SEVEN) == pytest.approx(14 / 900 / 14e9 * 100e12)
    assert cache_bytes_per_token(32, 8, 128, 2) == 131072
    assert CARD.pass_s(SEVEN, 1, 10, 1000) == pytest.approx((14e9 + 10 * 131072e3) / 900e9)


def test_batches_by_hand():
    plan = make_plan(
        Acceptance(0.8), 1 / 8, target=SEVEN, machine=CARD, context_tokens=0, batches=[1, 50, 1000]
    )
    one, fifty, thousand = plan.batches
    assert (one.speedup, one.draft_length) == (plan.best.speedup, plan.best.draft_length)
    assert one.plain_tokens_per_s == pytest.approx(900 / 14)
    # 50 sequences with γ = 5 are 300 rows of 0.14 ms, against one reading of the weights.
    verify = 300 * 14e9 / 100e12 / (14 / 900)
    assert fifty.speedup_kept == pytest.approx(tokens_per_call(0.8, 5) / (5 / 8 + verify))
    assert fifty.draft_length < 5
    assert fifty.speedup > fifty.speedup_kept
    # Past the balance a verifying pass costs its rows in full: no draft pays.
    assert (thousand.speedup, thousand.draft_length) == (1.0, 0)
    assert thousand.speedup_kept < 1
    assert (one.bound, thousand.bound) == ("memory", "arithmetic")


def test_a_known_draft_model_gives_the_cost_of_a_token():
    draft = Side(0.5e9, 1e9, 12288)
    plan = make_plan(Acceptance(0.8), target=SEVEN, draft=draft, machine=CARD, context_tokens=0)
    assert plan.drafting.ratio == pytest.approx(14)


def test_a_batch_of_one_is_one_sequence():
    price = Price.measured({1: 1.0, 2: 1.0, 8: 4.0})
    acceptance = Acceptance(0.6, proposed=(0.4, 0.4, 0.4, 0.2))
    plan = make_plan(acceptance, 0.01, price=price, start=0.02, rest=0.1)
    one = plan.batches[0]
    assert (one.draft_length, one.speedup) == (plan.best.draft_length, plan.best.speedup)


def test_batches_need_a_price_of_rows():
    assert make_plan(Acceptance(0.8), 0.1).batches == ()
    price = Price.measured({1: 1.0, 8: 2.0})
    sizes = [one.sequences for one in make_plan(Acceptance(0.8), 0.1, price=price).batches]
    assert sizes == [1, 2, 4, 8]


def test_memory_by_hand():
    draft = Side(None, 1e9, 1000)
    plan = make_plan(
        Acceptance(0.8), 0.1, target=SEVEN, draft=draft, context_tokens=100, batches=[3]
    )
    (found,) = plan.memories
    assert found.target_caches == 3 * 100 * 131072
    assert found.total == 14e9 + 1e9 + 3 * 100 * (131072 + 1000)


def test_the_map_has_each_cell_s_best():
    plan = make_plan(Acceptance(0.5), 0.3)
    for alpha, row in zip(ALPHAS, plan.map, strict=True):
        for ratio, (gain, length) in zip(RATIOS, row, strict=True):
            assert length == best_draft_length(alpha, 1 / ratio, 20)
            assert gain == pytest.approx(speedup(tokens_per_call(alpha, length), length / ratio))


def test_where_no_draft_pays_it_says_so():
    plan = make_plan(Acceptance(0.2), 0.5)
    assert plan.best.draft_length == 0
    assert headline(plan) == "Do not draft: plain decoding is the fastest"
    assert "One drafted token pays from an acceptance of 0.5 on." in sentences(plan)
    hopeless = make_plan(Acceptance(1.0), 1.5)
    assert "On these costs no draft pays, however often it stands." in sentences(hopeless)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_ends_of_acceptance(alpha):
    plan = make_plan(Acceptance(alpha), 0.1, longest=10)
    assert plan.best.draft_length == (10 if alpha else 0)
    said = " ".join(sentences(plan))
    assert "hardly ever stand" not in said
    assert assumptions(plan)
    far = make_plan(Acceptance(1.0), 0.1, chosen=2, longest=10)
    assert "a pass gives 11.00 tokens in place of 3.00, and each round" in " ".join(sentences(far))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cost": -0.1}, "cost of a drafted token"),
        ({"cost": float("nan")}, "cost of a drafted token"),
        ({"cost": None}, "is not known"),
        ({"longest": 0}, "longest draft must be from 1"),
        ({"chosen": 21}, "draft length must be from 0 to 20"),
        ({"decode_share": 1.1}, "decode share"),
        ({"context_tokens": -1}, "context"),
        ({"batches": [0]}, "batch"),
    ],
)
def test_numbers_out_of_range(change, told):
    with pytest.raises(UsageError, match=told):
        make_plan(Acceptance(0.5), **({"cost": 0.1} | change))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_no_probability(alpha):
    with pytest.raises(UsageError, match="from 0 to 1"):
        Acceptance(alpha)
    with pytest.raises(UsageError, match="from 0 to 1"):
        Acceptance(0.5, rates=(alpha,))


def test_sizes_out_of_range():
    for wrong in (lambda: Side(0.0), lambda: Machine(0.0, 1.0), lambda: Machine(1.0, -1.0)):
        with pytest.raises(UsageError, match="above 0"):
            wrong()


def one_round(drafted, accepted, correction=0, bonus=0, draft_s=0.0):
    return Round(drafted, accepted, correction, bonus, bool(correction), draft_s, 1.0, 2.0)


def test_depths_by_hand():
    depths = Depths(3)
    rounds = [
        one_round(3, 1, correction=1),  # stood, fell
        one_round(3, 3, bonus=1),  # all stood
        one_round(1, 1, bonus=1),  # the drafter had no more to propose
        one_round(0, 0, bonus=1),  # nor anything here
        one_round(3, 1),  # the output ended on the first token: no more was seen
    ]
    depths.add(rounds, max_tokens=30)
    assert depths.stood == [4, 1, 1]
    assert depths.reached == [5, 3, 1]
    assert depths.asked == [5, 5, 5]
    assert depths.proposed == [4, 3, 3]


def test_the_end_of_the_room_is_not_the_drafter_s_fault():
    depths = Depths(4)
    depths.add([one_round(2, 2, bonus=1)], max_tokens=3)
    assert depths.asked == [1, 1, 0, 0]
    assert depths.reached == depths.stood == [1, 1, 0, 0]


def iid_engine(p, q):
    """A target and a draft whose every token has the same law."""
    p, q = np.array(p), np.array(q)
    size = len(p)
    draft = ModelDrafter(ToyModel(lambda tokens: q, size))
    return Engine(ToyModel(lambda tokens: p, size), ToyTokenizer(size), drafter=draft)


def test_measured_acceptance_is_the_overlap_of_the_laws():
    """Under rejection each token stands with Σ min(p, q) = 0.7, independently."""
    engine = iid_engine([0.6, 0.3, 0.1], [0.3, 0.6, 0.1])
    engine.rule = "rejection"
    found = probe(engine, ["ab"] * 2, longest=3, max_tokens=300, temperature=1.0, ignore_eos=True)
    trials = sum(found.depths.reached)
    assert trials > 400
    error = np.sqrt(0.21 / trials)
    assert found.acceptance.alpha == pytest.approx(0.7, abs=5 * error)
    for rate, tried in zip(found.acceptance.rates, found.depths.reached, strict=True):
        assert rate == pytest.approx(0.7, abs=5 * np.sqrt(0.21 / tried))
    assert found.acceptance.proposed == (1.0, 1.0, 1.0)
    assert set(found.pass_s) >= {1, 2, 3, 4, 32}


def test_expected_tokens_are_those_of_the_requests_themselves():
    """The plan's tokens a call at the length that was run are what the runs had."""
    engine = iid_engine([0.6, 0.3, 0.1], [0.3, 0.6, 0.1])
    engine.rule = "rejection"
    request = {"max_tokens": 200, "temperature": 1.0, "ignore_eos": True, "seed": 3}
    found = probe(engine, ["ab"] * 2, longest=3, **request)
    measured, share = run_beside_plain(engine, ["ab"] * 2, 3, **request)
    assert found.acceptance.tokens(3) == pytest.approx(measured.tokens_per_target_call, rel=0.02)
    assert 0 < share <= 1
    assert measured.decode_speedup > 0


def test_lookups_count_rounds_without_a_proposal():
    engine = Engine.load("toy:vocab=4", drafter="ngram")
    found = probe(engine, ["abab", "ccdc"], longest=4, max_tokens=40, temperature=1.0)
    assert 0 < found.acceptance.proposed[0] < 1
    assert found.acceptance.proposed == tuple(sorted(found.acceptance.proposed, reverse=True))


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({1: 3.0, 3: 7.0}, (2.0, 1.0)),
        ({2: 4.0}, (2.0, 0.0)),
        ({1: 5.0, 3: 4.0}, (0.0, 4.5)),  # noise: more tokens do not take less
        ({1: 1.0, 3: 5.0}, (1.5, 0.0)),  # nor does starting
        ({0: 1.0}, (0.0, 0.0)),
    ],
)
def test_times_of_starting_and_of_a_token(times, expected):
    rounds = [one_round(n, 0, correction=1, draft_s=s) for n, s in times.items()]
    assert draft_times(rounds) == pytest.approx(expected)


def test_a_short_context_is_enough():
    engine = Engine(ToyModel.random(3, 1, context_length=16), ToyTokenizer(3), drafter="ngram")
    found = probe(engine, ["ababab"], longest=20, temperature=1.0)
    assert max(found.pass_s) < 16
    assert make_plan(found.acceptance, **found.costs, price=found.price).points


def test_passes_are_timed_at_each_number_of_rows_within_the_context():
    model = ToyModel.random(3, 1, context_length=12)
    assert set(pass_seconds(model, [1, 5], context=50)) == {1, 5}


@pytest.mark.parametrize(
    ("drafter", "words"),
    [("none", "nothing to plan"), ("model:toy:vocab=4#tree=2,2", "proposes trees")],
)
def test_drafters_that_cannot_be_planned(drafter, words):
    engine = Engine.load("toy:vocab=4", drafter=drafter)
    with pytest.raises(UsageError, match=words):
        probe(engine, ["ab"])


def test_a_drafter_that_never_proposes():
    engine = Engine.load("toy:vocab=4", drafter="ngram")
    with pytest.raises(UsageError, match="proposed nothing"):
        probe(engine, ["a"], max_tokens=1)


def test_json_by_the_command():
    found = told("--alpha", "0.8", "--cost-ratio", "8")
    assert found["draft_length"] == 5
    assert found["points"][4]["quoted_speedup"] == pytest.approx(2.8)
    assert found["cost_ratio"] == 8
    assert found["headline"].startswith("Draft 5 tokens")
    assert found["batches"] == []


def test_all_options_by_the_command():
    found = told(
        *("--alpha", "0.7", "--cost-ratio", "10", "--params", "7B", "--draft-params", "500M"),
        *("--bandwidth-gbs", "900", "--tflops", "100", "--kv-bytes-per-token", "131072"),
        *("--decode-share", "0.9", "--batch", "4", "--batch", "1", "--context", "1000"),
        *("--longest", "6"),
    )  # fmt: skip
    assert [one["batch"] for one in found["batches"]] == [1, 4]
    assert found["memory"][1]["target_cache_bytes"] == 4 * 1000 * 131072
    assert found["memory"][0]["draft_weights_bytes"] == 1e9
    assert len(found["points"]) == 7
    assert 0.9 in [one["decode_share"] for one in found["request_speedups"]]


def test_the_cost_of_verifying_by_the_command():
    found = told("--alpha", "0.8", "--cost-ratio", "20", "--verify-cost", "9=3")
    assert found["points"][8]["verify_cost"] == pytest.approx(3)
    assert found["points"][4]["verify_cost"] == pytest.approx(2)


def test_the_terminal_marks_the_best_and_shows_what_is_quoted():
    result = outcome("--alpha", "0.8", "--cost-ratio", "8", "-k", "4")
    assert result.exit_code == 0
    (best,) = [line for line in result.stdout.splitlines() if "◀ best" in line]
    assert best.split()[:3] == ["5", "3.69", "2.27"]
    assert re.search(r"\b4 +3\.36 +2\.24 +█+\S* +2\.80", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Either --alpha or --target is needed; got neither"),
        (("--alpha", "0.5", "--target", "toy"), "got both"),
        (("--alpha", "0.5"), "not known"),
        (("--alpha", "1.5", "--cost-ratio", "8"), "from 0 to 1"),
        (("--alpha", "nan", "--cost-ratio", "8"), "from 0 to 1"),
        (("--alpha", "0.5", "--cost-ratio", "0"), "--cost-ratio must be above 0"),
        (("--alpha", "0.5", "--cost-ratio", "-3"), "--cost-ratio must be above 0"),
        (("--alpha", "0.5", "--cost-ratio", "8", "--verify-cost", "8"), "ROWS=COST"),
        (("--alpha", "0.5", "--cost-ratio", "8", "--verify-cost", "8=0.5"), "ROWS=COST"),
        (("--alpha", "0.5", "--cost-ratio", "8", "--params", "big"), "number of parameters"),
        (("--alpha", "0.5", "--cost-ratio", "8", "--tflops", "9"), "go together"),
        (("--alpha", "0.5", "--cost-ratio", "8", "--html", "/no/such/x.html"), "does not exist"),
        (("--alpha", "0.5", "--cost-ratio", "8", "--html", "/tmp"), "is a folder"),
        (
            ("--alpha", "0.5", "--cost-ratio", "8", "--verify-cost", "4=2", "--verify-cost", "4=3"),
            "4 rows twice",
        ),
        (
            ("--alpha", "0.5", "--cost-ratio", "8", "--verify-cost", "8=2", "--verify-cost", "4=3"),
            "never cost less",
        ),
        (("--target", "toy", "--cost-ratio", "8"), "go with --alpha"),
        (("--target", "toy", "--prompts", "/no/such"), "cannot be read as prompts"),
    ],
)
def test_wrong_requests_end_in_a_message(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("plan")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abab\nccda\n")
    page = tmp_path / "plan.html"
    found = told(
        *("--target", "toy:vocab=4", "--drafter", "model:toy:vocab=4,seed=3"),
        *("--prompts", str(prompts), "--longest", "4", "--max-tokens", "40"),
        *("--temperature", "1", "--html", str(page)),
    )
    return found, page.read_text(encoding="utf-8")


def test_a_measured_plan_stands_beside_its_measurement(measured):
    found, page = measured
    assert found["target"] == "toy:vocab=4"
    assert found["prompts"] == 2
    assert found["pass_ms"]["1"] > 0
    assert 0 < found["alpha"] < 1
    assert found["measured"]["draft_length"] >= 1
    assert found["decode_share"] is not None
    assert "Measured on 2 prompts" in page


def test_the_page_is_one_file_with_pictures(measured):
    _, page = measured
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert page.count("<svg") >= 6
    assert page.count('role="img"') == page.count("<svg")
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "<script" not in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_escapes_what_it_is_told():
    about = {"target": "<b>&", "drafter": "</script>", "prompts": 1}
    plan = make_plan(Acceptance(0.5), 0.1, about=about)
    page = plan_page(plan, command="outrider plan '<i>'")
    assert "<b>" not in page
    assert "</script>" not in page
    assert "&lt;i&gt;" in page


def test_the_page_of_every_kind_of_plan():
    pages = [
        plan_page(make_plan(Acceptance(0.0), 0.5)),
        plan_page(make_plan(Acceptance(1.0), 0.0, longest=1)),
        plan_page(make_plan(Acceptance(0.8), 0.1, target=SEVEN, machine=CARD, decode_share=0.5)),
        plan_page(make_plan(Acceptance(0.8, (0.9, 0.5), (1.0, 0.5)), 0.1, longest=40)),
    ]
    assert [page.count("<svg") for page in pages] == [5, 5, 7, 5]
