"""Grammars: what they are made of, where the mask stands, and outputs that keep to them."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
import torch
from typer.testing import CliRunner

from outrider import Engine, Grammar
from outrider.cli.main import app
from outrider.core.processors import Context, Law
from outrider.core.proposal import Proposal
from outrider.drafters.script import ScriptDrafter
from outrider.engine.grammar import Grammars, Guided, _Words
from outrider.errors import SamplingError, UsageError
from outrider.models.tokenizer import HFTokenizer, ToyTokenizer
from outrider.models.toy import ToyModel
from tests.tokenizers_for_tests import KINDS, new_byte_level, small

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
V, END = 5, 4


def toy(**options) -> Engine:
    return Engine(ToyModel.random(V, seed=1), ToyTokenizer(V, [END]), **options)


@pytest.fixture(scope="module")
def engine():
    """A toy model whose tokens are bytes, and a few words."""
    words = HFTokenizer(new_byte_level())
    return Engine(ToyModel.random(words.vocab_size, seed=1), words, drafter="ngram")


def allowed(mask, output, vocab=V):
    scores = mask(Context([0, *output], 1), torch.zeros(vocab))
    return [i for i, score in enumerate(scores.tolist()) if score > -math.inf]


def fits(output: list[int], words: list[str]) -> set[int]:
    """What may come after an output, among a few words: worked out without a matcher."""
    text = "".join("abcde"[i] for i in output)
    nexts = {w[len(text)] for w in words if w.startswith(text) and w != text}
    return {"abcde".index(letter) for letter in nexts} | ({END} if text in words else set())


# --- the mask ------------------------------------------------------------------------------------


def test_the_mask_is_a_function_of_the_tokens_in_whatever_order_it_is_asked():
    words = ["a", "abc", "abd", "bb", "bbac", "cab"]
    mask = Grammars(ToyTokenizer(V, [END])).mask(Grammar.regex("|".join(words)), V)
    places = sorted({tuple("abcde".index(c) for c in w[:i]) for w in words for i in range(5)})
    rng = random.Random(0)
    for _ in range(300):
        place = list(rng.choice(places))
        assert set(allowed(mask, place)) == fits(place, words)


def test_after_the_end_only_end_tokens_and_after_those_whatever_comes():
    words = ToyTokenizer(6, [4, 5])
    mask = Grammars(words).mask(Grammar.regex("ab"), 6)
    assert allowed(mask, [0, 1], 6) == [4, 5]
    for beyond in ([0, 1, 4], [0, 1, 4, 4, 0], [0, 1, 2], [0, 1, 0, 1, 5]):
        assert allowed(mask, beyond, 6) == list(range(6))  # none of these can be reached
        assert allowed(mask, [0, 1], 6) == [4, 5]
    assert allowed(mask, [0], 6) == [1]


def test_a_rejected_draft_leaves_nothing_behind():
    mask = Grammars(ToyTokenizer(V, [END])).mask(Grammar.regex("(ab)*c"), V)
    fresh = Grammars(ToyTokenizer(V, [END])).mask(Grammar.regex("(ab)*c"), V)
    committed: list[int] = []
    rng = random.Random(3)
    for _ in range(40):
        for _ in range(3):  # drafts, good and bad
            draft = [rng.randrange(V) for _ in range(rng.randrange(6))]
            allowed(mask, [*committed, *draft])
        assert allowed(mask, committed) == allowed(fresh, committed)
        committed.append(0 if len(committed) % 2 == 0 else 1)


def test_rows_beyond_the_tokenizer_never_come():
    mask = Grammars(ToyTokenizer(V, [END])).mask(Grammar.regex("[a-d]*"), V + 70)
    assert allowed(mask, [], V + 70) == list(range(V))


def test_a_long_output_is_not_fed_twice(monkeypatch):
    mask = Grammars(ToyTokenizer(V, [END])).mask(Grammar.regex("[abcd]*"), V)
    fed = 0

    class Counting:
        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            return getattr(self._matcher, name)

        def try_consume_tokens(self, tokens):
            nonlocal fed
            fed += len(tokens)
            return self._matcher.try_consume_tokens(tokens)

    monkeypatch.setattr(mask, "_matcher", Counting(mask._matcher))
    output: list[int] = []
    for i in range(200):
        for depth in range(4):
            allowed(mask, [*output, *[1] * depth])
        output.append(i % 4)
    assert fed <= 200 * 5
    assert len(mask._masks) <= 64


@pytest.mark.parametrize("kind", KINDS)
def test_forced_texts_are_spelt_as_the_tokenizer_does_where_it_can(kind):
    words = small(kind)
    spell = _Words(words)
    pieces = words.pieces()
    for text in ("the", "s", "ab a", "thes"):
        ids = spell(text)
        spelt = b"".join(pieces[i] or b"" for i in ids)
        assert text.encode().startswith(spelt)  # some of these vocabularies lack letters
        assert spelt == text.encode() or not kind.startswith("byte")
        assert not set(ids) & set(words.special_tokens().values())
    if kind == "byte-level":
        assert spell(" the in") == words.encode(" the in")


# --- what cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema({"type": "strange"}), "Invalid type: strange"),
        (lambda: Grammar.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (lambda: Grammar.json_schema({"type": "string", "format": "odd"}), "Unknown format: odd"),
        (lambda: Grammar.json_schema({"$ref": "http://localhost/x"}), "does not fetch"),
        (lambda: Grammar.json_schema("{"), "must be a JSON object"),
        (lambda: Grammar.json_schema([1]), "must be a JSON object"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "must be a JSON object"),
        (lambda: Grammar.json_schema({"minimum": math.nan}), "must be a JSON object"),
        (lambda: Grammar.regex("(((") , "unclosed group"),
        (lambda: Grammar.lark("start: foo"), "unknown name"),
        (lambda: {"type": "object"}, "Grammar.json_schema"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_grammar_is_said(engine, make, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        engine.generate("a", grammar=make(), max_tokens=2)


def test_what_the_tokens_cannot_spell_is_said():
    with pytest.raises(UsageError, match=r"no token|cannot be used"):
        toy().generate("a", grammar=Grammar.regex("[0-9]"), max_tokens=2)


def test_what_does_not_go_with_a_grammar_is_said():
    grammar = Grammar.regex("a+")
    with pytest.raises(SamplingError, match="ignore_eos"):
        toy().generate("a", grammar=grammar, ignore_eos=True)
    with pytest.raises(SamplingError, match="min_tokens"):
        toy().generate("a", grammar=grammar, min_tokens=2)
    with pytest.raises(UsageError, match="end token"):
        Engine.load("toy:vocab=4").generate("a", grammar=grammar)
    with pytest.raises(UsageError, match="tokenizer"):
        Engine(ToyModel.random(4, 1)).generate([0], grammar=grammar)


# --- outputs -------------------------------------------------------------------------------------


def past_the_end(engine: Engine) -> ScriptDrafter:
    """Goes on with the last word of a text by the schema, and with another text behind it."""
    text = 'cat"},{"name":1}'

    def script(tokens, length):
        told = engine.tokenizer.decode(tokens)
        begun = next((n for n in range(5, 0, -1) if told.endswith(text[:n])), 0)
        return engine.encode(text[begun:])[:length]

    return ScriptDrafter(script)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_drafts_that_go_on_past_the_end_do_no_harm(engine, rule):
    grammar = Grammar.json_schema(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    drafter = past_the_end(engine)
    accepted = 0
    for seed in range(100 if rule == "coupled" else 10):
        output = engine.generate(
            "say", grammar=grammar, temperature=1.0, seed=seed, rule=rule,
            drafter=drafter, draft_length=5,
        )  # fmt: skip
        assert output.finish_reason == "stop"
        read = json.loads(output.text)
        assert list(read) == ["name", "age", "kind"]
        assert 0 <= read["age"] <= 99
        assert read["kind"] in ("cat", "dog")
        ends = [token in engine.tokenizer.eos_token_ids for token in output.token_ids]
        assert ends == [False] * (len(ends) - 1) + [True]
        accepted += output.trace.summary()["accepted_tokens"]
    assert accepted


def test_forced_tokens_are_drafted_for_nothing(engine):
    grammar = Grammar.regex("this is certain, all of it[.!]")
    plain = engine.generate("say", grammar=grammar, plain=True)
    drafted = engine.generate("say", grammar=grammar, draft_length=8)
    assert drafted.token_ids == plain.token_ids
    assert re.fullmatch("this is certain, all of it[.!]", drafted.text)
    assert drafted.trace.summary()["acceptance_rate"] == 1.0
    assert drafted.trace.summary()["tokens_per_target_call"] > 4


def test_a_draft_without_chance_is_cut_where_the_grammar_forbids_it():
    mask = Grammars(ToyTokenizer(V, [END])).mask(Grammar.regex("[ab][abc]*"), V)
    tree = Proposal((0, 2, 1, 3, END), (-1, -1, 0, 0, 2), (None,) * 5)

    class Fixed:
        def propose(self, tokens, length, pick):
            return tree

    made = Guided(Fixed(), mask, 2).propose([3, 3], 4, pick=None)
    assert (made.tokens, made.parents) == ((0, 1), (-1, 0))


def test_a_grammar_cut_by_max_tokens_ends_by_length(engine):
    output = engine.generate("say", grammar=Grammar.json_schema(SCHEMA), max_tokens=5)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 5
    assert output.text.startswith("{")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_json_object(engine, temperature):
    bias = {i: -8.0 for i, piece in enumerate(engine.tokenizer.pieces()) if piece and piece != b"}"}
    output = engine.generate(
        "say", grammar=Grammar.json_object(), temperature=temperature, seed=4, logit_bias=bias,
        max_tokens=200,
    )  # fmt: skip
    assert output.finish_reason == "stop"
    assert isinstance(json.loads(output.text), dict)


def test_a_schema_is_the_same_as_an_object_and_as_text():
    assert Grammar.json_schema(SCHEMA) == Grammar.json_schema(json.dumps(SCHEMA))


def test_a_grammar_is_compiled_once(engine):
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}})
    assert engine.grammars.compile(grammar) is engine.grammars.compile(grammar)
    assert engine.grammars is engine.grammars


def test_references_are_followed(engine):
    schema = {"$ref": "#/$defs/tag", "$defs": {"tag": {"enum": ["x", "y"]}}}
    output = engine.generate("say", grammar=Grammar.json_schema(schema), max_tokens=9)
    assert json.loads(output.text) in ("x", "y")


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json-schema", "{", "--regex", "a"], "exclude each other"),
        (["--json-schema", "{nothing"], "JSON object"),
        (["--json-schema", "no/such/file.json"], "cannot be read"),
    ],
)
def test_wrong_options_are_told(options, says):
    found = CliRunner().invoke(app, ["generate", "ab", "--target", "toy", *options])
    assert found.exit_code != 0
    assert says in (str(found.exception) if found.exception else "") + found.output


def test_the_command_line_takes_a_schema_from_a_file(tmp_path):
    from outrider.cli.generate import read_grammar

    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    assert read_grammar(str(file), None) == Grammar.json_schema(SCHEMA)
    assert read_grammar(json.dumps(SCHEMA), None) == Grammar.json_schema(SCHEMA)
    assert read_grammar(None, "a+") == Grammar.regex("a+")
    assert read_grammar(None, None) is None


# --- grammars that outgrow the matcher -----------------------------------------------------------

MANY = {f"k{i}": {"type": "string"} for i in range(600)}
"""Properties that may come in any order: more than llguidance follows side by side."""

NESTED = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "object", "properties": MANY}},
    "additionalProperties": False,
}


def byte_mask():
    words = HFTokenizer(new_byte_level())
    made = Grammars(words).mask(Grammar.json_schema(NESTED), words.vocab_size)
    return made, words


def test_a_grammar_that_grows_too_complex_is_an_error_and_never_no_grammar():
    mask, words = byte_mask()
    deep = words.encode('{"b": {')
    for _ in range(2):
        with pytest.raises(UsageError, match="leaves no token"):
            allowed(mask, deep, words.vocab_size)
        with pytest.raises(UsageError):
            mask.forced(deep)


def test_a_draft_that_leads_there_changes_nothing_for_the_text():
    fresh, words = byte_mask()
    text, deep = words.encode('{"a'), words.encode('{"b": {')
    expected = allowed(fresh, text, words.vocab_size)
    assert 0 < len(expected) < words.vocab_size
    mask, _ = byte_mask()
    law = Law(mask=mask)
    logits = torch.zeros(words.vocab_size)
    q = law.of_draft(Context([0, *deep], 1), logits)  # goes without: what it drafts is refused
    assert len(q.ids) == words.vocab_size
    assert allowed(mask, text, words.vocab_size) == expected


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_an_output_that_comes_there_ends_with_an_error(drafter):
    words = HFTokenizer(new_byte_level())
    engine = Engine(ToyModel.random(words.vocab_size, seed=1), words, drafter=drafter)
    schema = {"type": "object", "properties": MANY}
    with pytest.raises(UsageError, match="leaves no token"):
        engine.generate("a", max_tokens=12, grammar=Grammar.json_schema(schema))
