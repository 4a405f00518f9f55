"""Configurations by name: what is read, what is refused, and with which words."""

from __future__ import annotations

import pytest

from outrider.errors import UnknownNameError, UsageError
from outrider.lab.bench import check_measurable
from outrider.lab.configuration import (
    Configuration,
    check_labels,
    combine,
    parse_configuration,
)


@pytest.mark.parametrize(
    ("text", "drafter", "rule", "length"),
    [
        ("drafter=eagle,rule=rejection,draft-length=4", "eagle", "rejection", 4),
        ("eagle", "eagle", "auto", "auto"),
        (" eagle , rule=block ", "eagle", "block", "auto"),
        ("draft_length=3,drafter=ngram", "ngram", "auto", 3),
        ("suffix:match=3+eagle,draft-length=adaptive:9", "suffix:match=3+eagle", "auto",
         "adaptive:9"),
        ("model:toy:vocab=4,seed=9#tree=4,2,1,rule=rejection",
         "model:toy:vocab=4,seed=9#tree=4,2,1", "rejection", "auto"),
        ("drafter=script:1,2,3,draft-length=2", "script:1,2,3", "auto", 2),
        ("drafter=none", "none", "auto", "auto"),
    ],
)  # fmt: skip
def test_read(text, drafter, rule, length):
    found = parse_configuration(text)
    assert (found.drafter, found.rule, found.draft_length) == (drafter, rule, length)
    assert parse_configuration(found.label) == found


def test_a_label_of_its_own():
    found = parse_configuration("eagle,label=the head")
    assert (found.label, found.drafter) == ("the head", "eagle")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drafer=eagle", ["'drafer'", "Did you mean 'drafter'"]),
        ("eagle,rul=block", ["'rul'", "Did you mean 'rule'"]),
        ("eagle,draft-lenght=4", ["'draft-lenght'", "Did you mean 'draft-length'"]),
        ("eagle,rule=block,rule=greedy", ["'rule'", "twice"]),
        ("drafter=,rule=block", ["'drafter'", "no value"]),
        ("rule=block", ["needs a drafter", "rule=block", "Example"]),
        ("", ["'drafter' has no value"]),
        ("eagle,draft-length=two", ["'two'", "number, auto or a policy"]),
        ("eagle,draft-length=-1", ["'-1'"]),
        ("eagle,label=plain", ["'plain'", "baseline"]),
    ],
)
def test_refused(text, words):
    with pytest.raises(UsageError) as caught:
        parse_configuration(text)
    for word in words:
        assert word in str(caught.value)


def test_every_drafter_with_every_rule_and_length():
    labels = [c.label for c in combine(["ngram", "suffix"], ["coupled", "block"], ["2", "auto"])]
    assert labels == [
        "ngram,rule=coupled,draft-length=2", "ngram,rule=coupled",
        "ngram,rule=block,draft-length=2", "ngram,rule=block",
        "suffix,rule=coupled,draft-length=2", "suffix,rule=coupled",
        "suffix,rule=block,draft-length=2", "suffix,rule=block",
    ]  # fmt: skip
    assert [c.label for c in combine([])] == ["auto"]


def test_one_label_one_configuration():
    with pytest.raises(UsageError, match="'ngram'"):
        check_labels([Configuration("ngram"), Configuration("ngram")])
    check_labels([Configuration("ngram"), Configuration("ngram", label="again")])


class TestBeforeLoading:
    def test_names_are_checked(self):
        with pytest.raises(UnknownNameError, match="Did you mean 'ngram'"):
            check_measurable([Configuration("ngrm")], [0.0])
        with pytest.raises(UnknownNameError, match="Did you mean 'coupled'"):
            check_measurable([Configuration("ngram", "coupld")], [0.0])

    def test_a_rule_must_fit_every_temperature(self):
        greedy = [Configuration("ngram", "greedy")]
        check_measurable(greedy, [0.0])
        with pytest.raises(UsageError, match="temperature 0"):
            check_measurable(greedy, [0.0, 0.7])

    @pytest.mark.parametrize(
        ("temperatures", "batches", "words"),
        [
            ([0.0, 0.0], [1], "temperature is given twice"),
            ([0.0], [0], "at most 256; got a batch size of 0"),
            ([0.0], [1, 1], "batch size is given twice"),
        ],
    )
    def test_others(self, temperatures, batches, words):
        with pytest.raises(UsageError, match=words):
            check_measurable([Configuration("ngram")], temperatures, batches=batches)
