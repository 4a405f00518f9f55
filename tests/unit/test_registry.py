"""Names: each one loads, a misspelt one is met half-way, and nobody can take ours."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from outrider import registry
from outrider.errors import UnknownNameError, UsageError
from outrider.models.locate import locate
from outrider.models.toy import load as load_toy
from outrider.registry import (
    DRAFTERS,
    POLICIES,
    RULES,
    RUNTIMES,
    Table,
    did_you_mean,
    refuse_argument,
)

TABLES = {"drafters": DRAFTERS, "rules": RULES, "runtimes": RUNTIMES, "policies": POLICIES}
ENTRIES = [(group, name) for group, table in TABLES.items() for name in table]


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_every_entry_loads_and_answers_to_its_name(group, name):
    part = TABLES[group].load(name)
    assert callable(part)
    if group != "runtimes":  # a runtime is a function; its name is only its entry
        assert part.name == name


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_is_a_mapping(table):
    assert len(table) == len(list(table)) > 0
    assert all(name in table and ":" in table[name] for name in table)
    assert "no such" not in table


@pytest.mark.parametrize(
    ("table", "wrong", "right"),
    [
        (DRAFTERS, "ngrma", "ngram"),
        (DRAFTERS, "modle", "model"),
        (RULES, "gredy", "greedy"),
        (RULES, "rejectoin", "rejection"),
        (POLICIES, "fixd", "fixed"),
        (RUNTIMES, "hff", "hf"),
    ],
)
def test_a_misspelt_name_is_met_half_way(table, wrong, right):
    with pytest.raises(UnknownNameError) as caught:
        table.load(wrong)
    message = str(caught.value)
    assert f"There is no {table.kind} named '{wrong}'." in message
    assert f"Did you mean '{right}'?" in message
    assert all(name in message for name in [*table, *table.also])


def test_a_name_like_no_other_gets_the_list_and_no_guess():
    with pytest.raises(UnknownNameError) as caught:
        RULES.load("zzzz")
    assert "Did you mean" not in str(caught.value)
    assert "Known: auto, greedy" in str(caught.value)


def test_did_you_mean_takes_lists_and_mappings():
    assert did_you_mean("b", ["bb", "a"]) == "Did you mean 'bb'? Known: bb, a."
    assert did_you_mean("b", {"a": 1}) == "Known: a."


def test_an_argument_where_none_belongs_is_refused():
    refuse_argument("ngram", "")
    with pytest.raises(UsageError, match="'ngram' takes no argument; got 'ngram:5'"):
        refuse_argument("ngram", "5")


# --- parts of other packages ---------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages with these entry points are installed."""

    def install(**groups: dict[str, str]) -> None:
        def entry_points(*, group: str) -> list[EntryPoint]:
            named = groups.get(group.removeprefix("outrider."), {})
            return [EntryPoint(name, value, group) for name, value in named.items()]

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return install


def test_entry_points_add_parts(installed):
    installed(drafters={"theirs": "collections:OrderedDict"})
    table = Table("drafters", "drafter", {"ours": "builtins:int"})
    assert set(table) == {"ours", "theirs"}
    assert table.load("theirs").__name__ == "OrderedDict"


def test_entry_points_cannot_replace_ours(installed):
    installed(drafters={"ours": "collections:OrderedDict"})
    table = Table("drafters", "drafter", {"ours": "builtins:int"})
    assert table.load("ours") is int
    assert len(table) == 1


@pytest.mark.parametrize("group", TABLES)
def test_each_table_reads_the_group_that_the_documentation_names(group, installed):
    own = TABLES[group]
    installed(**{group: {"theirs": "collections:OrderedDict"}})
    assert f"``outrider.{group}``" in str(registry.__doc__)
    assert "theirs" in Table(own.group, own.kind, {})


# --- toy models by name --------------------------------------------------------------------------


def test_a_toy_by_name_has_what_was_asked_for():
    model, tokenizer = load_toy(locate("toy:vocab=6,seed=2,context=50"))
    assert (model.vocab_size, model.context_length, tokenizer.vocab_size) == (6, 50, 6)
    assert load_toy(locate("toy:seed=2"))[0].next([1]).tolist() != (
        load_toy(locate("toy:seed=3"))[0].next([1]).tolist()
    )


@pytest.mark.parametrize(
    "options", ["vocab=x", "vocab=nan", "vocab=inf", "vocab=0", "vocab=-3", "vocab=2.5",
                "seed=-1", "seed=1.5", "order=-1", "context=0", "sharpness=nan", "sharpness=inf"],
)  # fmt: skip
def test_toy_options_that_make_no_model_are_refused(options):
    with pytest.raises(UsageError, match="toy"):
        load_toy(locate(f"toy:{options}"))


def test_an_unknown_toy_option_is_met_half_way():
    with pytest.raises(UnknownNameError, match="Did you mean 'vocab'"):
        load_toy(locate("toy:vocb=4"))
