"""Drafts across tokenizers: what is read, what is proposed, and the exact law of both methods."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.chooser import SeededChooser
from outrider.core.distribution import Distribution
from outrider.core.processors import Context, Law, Sampling
from outrider.core.proposal import Proposal
from outrider.drafters.crosstoken import CrossTokenDrafter
from outrider.drafters.respell import Reader, Words
from outrider.engine.engine import Engine
from outrider.engine.loading import load_draft
from outrider.errors import (
    NumericalError,
    RollbackError,
    TokenizerMismatchError,
    UnknownNameError,
    UsageError,
)
from outrider.models.tokenizer import HFTokenizer, ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.protocols import Pick, Setting, Tokenizer
from outrider.registry import RULES
from tests.laws import chain_law, distance, speculative_law
from tests.tokenizers_for_tests import QWEN_SMALL, SMOLLM2, new_byte_level, real, small, spell

CROSSINGS = [
    (a, b) for a, b in product(["byte-level", "byte-fallback", "metaspace"], repeat=2) if a != b
]
crossings = pytest.mark.parametrize(("target", "draft"), CROSSINGS)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" atheins\n你😀é"))


def words(tokenizer: Tokenizer) -> Words:
    return Words(tokenizer, tokenizer.vocab_size)


def model_of(probabilities, tokenizer: Tokenizer, **options) -> ToyModel:
    return ToyModel(probabilities, tokenizer.vocab_size, **options)


def saying(ids: Sequence[int], rows: int, **options) -> ToyModel:
    """A model that is sure of this one sequence, and of its last token ever after."""

    def probabilities(tokens: tuple[int, ...]) -> np.ndarray:
        law = np.zeros(rows)
        law[ids[min(len(tokens), len(ids) - 1)]] = 1.0
        return law

    return ToyModel(probabilities, rows, **options)


def drafter_of(
    draft: ToyModel, draft_words: Tokenizer, target_words: Tokenizer, method: str
) -> CrossTokenDrafter:
    target = ToyModel.random(target_words.vocab_size, 0)
    return CrossTokenDrafter(draft, draft_words, target, target_words, method=method)


def pick_for(tokens: Sequence[int], law: Law | None = None, rule: str = "rejection") -> Pick:
    chosen, chooser, law = RULES.load(rule)(), SeededChooser(3), law or Law()
    return Pick(
        lambda logits, path: law(Context([*tokens, *path], 1), logits),
        lambda q, depth, node: chosen.draft(q, chooser, depth, 0, node),
        lambda *_: pytest.fail("a chain has no siblings"),
    )


def propose(drafter: CrossTokenDrafter, tokens: Sequence[int], length: int, **how) -> Proposal:
    return drafter.start(tokens, 64).propose(tokens, length, pick_for(tokens, **how))


# --- tokens as bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace", "word-piece"])
def test_pieces_are_what_tokens_read_as(kind):
    tokenizer = small(kind)
    pieces = tokenizer.pieces()
    special = set(tokenizer.special_tokens().values())
    assert len(pieces) == tokenizer.vocab_size
    assert {i for i, piece in enumerate(pieces) if piece is None} >= special
    assert {"<s>", "</s>"} <= tokenizer.special_tokens().keys()
    for i, piece in enumerate(pieces):
        if piece is not None and "\ufffd" not in tokenizer.token_text(i):
            assert piece.decode() == tokenizer.token_text(i)


@pytest.mark.parametrize("file", [SMOLLM2, pytest.param(QWEN_SMALL, marks=pytest.mark.pair)])
def test_pieces_of_real_tokenizers(file):
    tokenizer = real(file)
    pieces = tokenizer.pieces()
    text = " The quick brown fox's café\n\n\t你好，世界 😀👩‍👩‍👧 Привет 12345 {}"
    assert b"".join(pieces[i] for i in tokenizer.encode(text)) == text.encode()
    assert pieces[tokenizer.special_tokens()["<|im_start|>"]] is None


def test_bytes_of_a_byte_fallback_vocabulary_are_bytes():
    tokenizer = small("byte-fallback")
    spelled = [tokenizer.pieces()[i] for i in tokenizer.encode("😀")]
    assert b"".join(spelled) == " 😀".encode()
    assert max(map(len, spelled)) == 1


def test_a_letter_that_a_byte_token_spells_too_is_the_letter():
    tokenizer = small("byte-fallback")
    assert words(tokenizer).ids[b"a"] == tokenizer.vocabulary.index("a")


def test_toy_pairs():
    tokenizer = ToyTokenizer(5, [4], pairs=2)
    assert tokenizer.vocabulary == ["ab", "bc", "a", "b", "c"]
    assert tokenizer.encode("abcabb") == [0, 4, 0, 3]
    assert tokenizer.pieces() == [b"ab", b"bc", b"a", b"b", None]
    assert tokenizer.special_tokens() == {"c": 4}
    assert ToyTokenizer(1, pairs=3).vocabulary == ["a"]


# --- reading -------------------------------------------------------------------------------------


@crossings
@settings(max_examples=30)
@given(text=TEXTS.filter(bool))
def test_a_text_is_read_whole(target, draft, text):
    """What the draft's vocabulary can spell comes through to the byte."""
    source, reader = small(target), Reader(words(small(target)), words(small(draft)))
    ids = source.encode(text)
    wanted = words(source).spell(ids)
    read = reader.read(ids)
    assert read is not None
    if draft == "byte-level" and wanted is not None:
        assert words(small(draft)).spell(read) == wanted


@crossings
@settings(max_examples=30)
@given(data=st.data())
def test_reading_bit_by_bit_is_reading_at_once(target, draft, data):
    """Any tokens at all: parts of characters, special tokens, what no text is encoded as."""
    a, b = words(small(target)), words(small(draft))
    ids = data.draw(st.lists(st.integers(0, len(a.pieces) - 1), max_size=12)) * 8
    reader = Reader(a, b)
    for end in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6))):
        assert reader.read(ids[:end]) == Reader(a, b).read(ids[:end])
    other = ids[: len(ids) // 2]  # back, too
    assert reader.read(other) == Reader(a, b).read(other)


@pytest.mark.parametrize("unit", ["the inn ", "你", "a\n", "é"])
def test_a_long_text_is_read_in_pieces_and_only_its_end_again(unit):
    source = new_byte_level()
    encoded: list[int] = []

    class Counting(HFTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode(text)

    target = words(small("byte-fallback"))
    reader = Reader(target, words(Counting(source)))
    ids = small("byte-fallback").encode(unit * (4000 // len(unit)))
    read = reader.read(ids)
    assert words(HFTokenizer(source)).spell(read) == target.spell(ids)
    encoded.clear()
    reader.read([*ids, ids[-1]])
    assert sum(encoded) < 1000


def test_a_long_text_is_read_as_the_draft_would_encode_it():
    text = "The quick brown fox's 12345 jumps,  over\n\n\tthe lazy dog!? 你好，世界 😀 " * 40
    smollm = real(SMOLLM2)
    source = HFTokenizer(new_byte_level())
    assert Reader(words(source), words(smollm)).read(source.encode(text)) == smollm.encode(text)


def test_special_tokens_are_read_by_name_or_not_at_all():
    source, target = small("byte-level"), small("byte-fallback")
    mark, end = (source.special_tokens()[name] for name in ("<|mark|>", "</s>"))
    ids = [*source.encode("a"), mark, *source.encode("b"), end]
    read = Reader(words(source), words(target)).read(ids)
    assert read[-1] == target.special_tokens()["</s>"]
    assert words(target).spell(read[:-1]) == b" ab"


def test_a_beginning_that_both_mark_is_marked_once():
    class Marked(ToyTokenizer):
        """Begins a text with its letter c, and ends it with d."""

        def encode(self, text: str) -> list[int]:
            return [2, *super().encode(text), 3]

    marked = Marked(4, [2, 3])
    a, b = words(marked), words(marked)
    assert b.begin == [2]
    assert Reader(a, b).read([2, 0, 1]) == [2, 0, 1]
    assert Reader(words(ToyTokenizer(4)), b).read([0, 1]) == [2, 0, 1]


def test_what_the_draft_has_no_token_for_is_not_read():
    reader = Reader(words(ToyTokenizer(4)), words(ToyTokenizer(3, pairs=1)))
    assert reader.read([0, 1, 0]) == [0, 1]
    assert reader.read([0, 1, 0, 3]) is None
    assert reader.read([0, 1, 0, 3, 0]) is None
    assert reader.read([0, 1]) == [0]


# --- token-level intersection --------------------------------------------------------------------


def test_the_law_is_the_drafts_over_what_both_have():
    """q'(x) = q(x) / the sum over the intersection, written over the target's ids."""
    target_words, draft_words = ToyTokenizer(4), ToyTokenizer(4, pairs=1)  # abcd; ab a b c
    q = np.array([0.4, 0.3, 0.2, 0.1])
    draft = model_of(lambda tokens: q, draft_words)
    proposal = propose(drafter_of(draft, draft_words, target_words, "tli"), [0, 1], 3)
    assert len(proposal) == 3
    for law in proposal.laws:
        assert law is not None
        assert law.to_dense() == pytest.approx([0.5, 1 / 3, 1 / 6, 0.0], abs=1e-15)


def test_processors_see_the_targets_ids():
    target_words, draft_words = ToyTokenizer(4), ToyTokenizer(4, pairs=1)
    draft = model_of(lambda tokens: np.full(4, 0.25), draft_words)
    law = Sampling(temperature=1.0, logit_bias={2: float(np.log(2))}).law(frozenset(), 4)
    proposal = propose(drafter_of(draft, draft_words, target_words, "tli"), [0], 1, law=law)
    assert proposal.laws[0].to_dense() == pytest.approx([0.25, 0.25, 0.5, 0.0], abs=1e-7)


def test_special_tokens_never_match():
    draft_words = ToyTokenizer(3, [0])
    draft = model_of(lambda tokens: np.array([0.8, 0.1, 0.1]), draft_words)
    proposal = propose(drafter_of(draft, draft_words, ToyTokenizer(3, [0]), "tli"), [1], 1)
    assert proposal.laws[0].to_dense() == pytest.approx([0.0, 0.5, 0.5])


@pytest.mark.parametrize("weights", [[1.0, 0.0, 0.0], [0.9, 0.1, 0.0]])
def test_nothing_is_proposed_where_nothing_common_can_come(weights):
    draft_words = ToyTokenizer(3, pairs=1)  # ab a b
    draft = model_of(lambda tokens: np.array(weights), draft_words)
    drafter = drafter_of(draft, draft_words, ToyTokenizer(2), "tli")
    law = Sampling(temperature=1.0, min_tokens=9).law(frozenset({0}), 2)
    assert len(propose(drafter, [0], 2, law=law)) == 0


def test_numbers_that_are_none_are_told():
    draft_words = ToyTokenizer(3)
    draft = model_of(lambda tokens: np.array([np.nan, 0.5, 0.5]), draft_words)
    with pytest.raises(NumericalError):
        propose(drafter_of(draft, draft_words, ToyTokenizer(3), "tli"), [0], 2)


def test_nothing_in_common():
    class Capitals(ToyTokenizer):
        def pieces(self) -> list[bytes | None]:
            return [piece and piece.upper() for piece in super().pieces()]

    draft = ToyModel.random(3, 0)
    drafter = drafter_of(draft, Capitals(3), ToyTokenizer(3), "auto")
    assert drafter.method == "slem"
    assert len(propose(drafter_of(draft, Capitals(3), ToyTokenizer(3), "tli"), [0], 2)) == 0


def test_auto_goes_by_what_they_have_in_common():
    draft = ToyModel.random(6, 0)
    few, many = ToyTokenizer(6, pairs=4), ToyTokenizer(6, pairs=3)
    assert drafter_of(draft, few, ToyTokenizer(6), "auto").method == "slem"
    assert drafter_of(draft, many, ToyTokenizer(6), "auto").method == "auto"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_goes_by_whether_tokens_are_sampled(temperature):
    draft_words = ToyTokenizer(4, pairs=1)
    draft = model_of(lambda tokens: np.array([0.4, 0.3, 0.2, 0.1]), draft_words)
    law = Sampling(temperature).law(frozenset(), 4)
    made = {
        method: propose(drafter_of(draft, draft_words, ToyTokenizer(4), method), [0], 3, law=law)
        for method in ("auto", "tli", "slem")
    }
    other = "tli" if temperature else "slem"
    assert made["auto"].tokens == made[other].tokens
    assert [law is None for law in made["auto"].laws] == [law is None for law in made[other].laws]
    assert made["tli"].tokens != made["slem"].tokens


# --- string-level exact match --------------------------------------------------------------------


@crossings
@settings(max_examples=40)
@given(before=TEXTS.filter(bool), after=TEXTS, length=st.integers(1, 6), keep=st.integers(0, 3))
def test_a_proposed_text_is_the_drafts_own(target, draft, before, after, length, keep):
    """Whatever the seam cuts through: a word, a character, a token."""
    source, other = small(target), small(draft)
    tokens = source.encode(before)
    tokens = tokens[: max(1, len(tokens) - keep)]  # often ends within a word or a character
    read = Reader(words(source), words(other)).read(tokens)
    end = other.special_tokens()["</s>"]
    own = words(other).middle(after) if after else []
    if not read or own is None:
        return
    model = saying([*read, *own, end], other.vocab_size)
    proposal = propose(drafter_of(model, other, source, "slem"), tokens, length)
    assert set(proposal.laws) <= {None}
    assert len(proposal) <= length
    spelled = words(source).spell(proposal.tokens)
    assert spelled is not None
    assert (words(other).spell(own) or b"").startswith(spelled)


def continued(before: list[int], text: str, source: HFTokenizer, length: int = 8) -> list[int]:
    """What byte-level ``source`` is proposed when a byte-fallback draft goes on with a text."""
    other = small("byte-fallback")
    read = Reader(words(source), words(other)).read(before)
    sequence = [*read, *words(other).middle(text), other.special_tokens()["</s>"]]
    drafter = drafter_of(saying(sequence, other.vocab_size), other, source, "slem")
    return list(propose(drafter, before, length).tokens)


def test_the_seam():
    source = HFTokenizer(
        new_byte_level([("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")])
    )
    ids = source.encode
    # Whole words go on as one text would be encoded.
    assert continued(ids("hello"), " hello", source) == ids(" hello")
    # A word that stands in parts is not taken back.
    assert continued(ids("he"), "llo", source) == ids("llo")
    assert ids("he") + ids("llo") != ids("hello")
    # Nor is a spelling that is not the tokenizer's own.
    assert continued(ids("h") + ids("e"), " hello", source) == ids(" hello")


def test_a_character_that_is_not_whole_waits():
    source = small("byte-level")
    # This draft's bytes come one a token; the target's come two a token.
    whole = source.encode("😀")
    assert [source.vocabulary[i] for i in whole] == [spell("😀")[:2], spell("😀")[2:]]
    assert continued(source.encode("a"), "😀", source) == whole
    other = small("byte-fallback")
    cut = [other.vocabulary.index(f"<0x{byte:02X}>") for byte in "😀".encode()]
    read = Reader(words(source), words(other)).read([*source.encode("a"), whole[0]])
    assert read[-2:] == cut[:2]
    for own, wanted in ((cut[2:], whole[1:]), (cut[2:3], [])):
        model = saying([*read, *own, other.special_tokens()["</s>"]], other.vocab_size)
        drafter = drafter_of(model, other, source, "slem")
        assert list(propose(drafter, [*source.encode("a"), whole[0]], 4).tokens) == wanted


def test_a_text_is_drafted_in_as_many_steps_as_it_takes():
    """A pair is one step of the draft's and two tokens of the target's, and the other way round."""
    pairs, letters = ToyTokenizer(4, pairs=1), ToyTokenizer(4)  # ab a b c; a b c d
    one = drafter_of(saying([0] * 9, 4), pairs, letters, "slem")
    assert propose(one, [0, 1], 4).tokens == (0, 1, 0, 1)
    assert propose(one, [0, 1], 3).tokens == (0, 1, 0)
    other = drafter_of(saying([0, 1] * 9, 4), letters, pairs, "slem")
    # It stops at two tokens: the second would have grown to a pair, and costs nothing if wrong.
    assert propose(other, [0], 2).tokens == (0, 1)
    assert propose(other, [0], 0).tokens == ()


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_the_drafts_end_ends_the_draft(method):
    draft_words = ToyTokenizer(3, [2])
    drafter = drafter_of(saying([0, 1, 2, 2], 3), draft_words, ToyTokenizer(3), method)
    assert propose(drafter, [0], 3).tokens == (1,)


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_the_drafts_context(method):
    draft_words = ToyTokenizer(4, pairs=1)
    draft = ToyModel.random(4, 1, context_length=4)
    drafter = drafter_of(draft, draft_words, ToyTokenizer(3), method)
    assert len(propose(drafter, [0] * 3, 4, rule="coupled")) <= 2
    assert len(propose(drafter, [0] * 4, 4, rule="coupled")) == 0
    # The pair is one token to the draft, so that more of the target's have room.
    assert len(propose(drafter, [0, 1] * 4, 4, rule="coupled")) == 0
    long = drafter_of(
        saying([0, 0, 0, 1], 4, context_length=4), draft_words, ToyTokenizer(3), method
    )
    assert propose(long, [0, 1] * 3, 4).tokens[:1] == (0,)


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_a_cache_that_gets_too_small_grows(method):
    """Four of the draft's tokens for each of the target's."""
    source, other = ToyTokenizer(4, pairs=3), ToyTokenizer(4)  # ab, bc, cd, a; a, b, c, d
    drafter = drafter_of(saying([0, 1] * 99, 4), other, source, method)
    session = drafter.start([0], 2)
    for count in (1, 2, 5, 30):
        tokens = [0] * count
        fresh = drafter.start(tokens, 99).propose(tokens, 2, pick_for(tokens))
        assert session.propose(tokens, 2, pick_for(tokens)).tokens == fresh.tokens


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_what_the_draft_has_seen_is_not_fed_again(method):
    fed: list[int] = []

    class Counting(ToyModel):
        def score(self, cache, tokens, proposal):
            fed.extend(tokens)
            return super().score(cache, tokens, proposal)

        def prefill(self, cache, tokens, progress=None):
            fed.extend(tokens)
            super().prefill(cache, tokens, progress)

    inner = ToyModel.random(4, 3)
    drafter = drafter_of(Counting(inner.next, 4), ToyTokenizer(4, pairs=1), ToyTokenizer(3), method)
    tokens = [0, 2, 1] * 10
    session = drafter.start(tokens, 64)
    session.propose(tokens, 2, pick_for(tokens, rule="coupled"))
    fed.clear()
    session.propose([*tokens, 2], 1, pick_for(tokens, rule="coupled"))
    assert len(fed) <= 6


EXACT = [name for name in RULES if RULES.load(name).exact]
DRAFTS = {"letters": (3, 0), "fewer": (2, 0), "pairs": (4, 1), "more": (7, 3), "one": (3, 1)}


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("method", ["tli", "slem", "auto"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", ["plain", "processed"])
def test_exact_law(rule, method, draft, sampling):
    """Of whole outputs, by enumeration: the target's own, whatever the draft's tokens are."""
    vocab, pairs = DRAFTS[draft]
    target = ToyModel.random(3, 1)
    drafter = CrossTokenDrafter(
        ToyModel.random(vocab, 9), ToyTokenizer(vocab, pairs=pairs), target, ToyTokenizer(3),
        method=method,
    )  # fmt: skip
    values = {"plain": Sampling(1.0), "processed": Sampling(0.8, 2, 1.0, 0.05, 1.3, 0.2)}[sampling]
    if rule == "greedy":
        values = Sampling()
    ends = frozenset({2}) if sampling == "processed" else frozenset()
    law = values.law(ends, 3)
    request = {"max_tokens": 3, "law": law, "end_ids": ends, "prompt": (0, 1, 0)}
    for draft_length in (1, 3):
        made = speculative_law(
            target, drafter, RULES.load(rule)(), draft_length=draft_length, **request
        )
        assert distance(made, chain_law(target, **request)) <= 1e-12


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("method", ["tli", "slem"])
def test_exact_law_where_the_targets_tokens_are_pairs(rule, method):
    target = ToyModel.random(3, 1)  # ab a b
    drafter = CrossTokenDrafter(
        ToyModel.random(2, 9), ToyTokenizer(2), target, ToyTokenizer(3, pairs=1), method=method
    )
    law = (Sampling() if rule == "greedy" else Sampling(1.0)).law(frozenset(), 3)
    request = {"max_tokens": 3, "law": law, "prompt": (0, 1)}
    made = speculative_law(target, drafter, RULES.load(rule)(), draft_length=2, **request)
    assert distance(made, chain_law(target, **request)) <= 1e-12


def test_a_law_that_is_not_what_was_drawn_from_is_caught(monkeypatch):
    """The control: the draft's law before it was restricted and renormalised."""
    target = ToyModel.random(3, 1)
    drafter = CrossTokenDrafter(
        ToyModel.random(4, 9), ToyTokenizer(4, pairs=1), target, ToyTokenizer(3), method="tli"
    )
    chain = Proposal.chain

    def blurred(tokens, laws=None, **more):
        uniform = [law and Distribution.dense([1.0] * law.vocab_size) for law in laws or ()]
        return chain(tokens, uniform or None, **more)

    request = {"max_tokens": 2, "prompt": (0, 1, 0)}
    rule = RULES.load("rejection")()
    wanted = chain_law(target, **request)
    assert (
        distance(speculative_law(target, drafter, rule, draft_length=2, **request), wanted) < 1e-12
    )
    monkeypatch.setattr(Proposal, "chain", blurred)
    assert (
        distance(speculative_law(target, drafter, rule, draft_length=2, **request), wanted) > 1e-3
    )


# --- by name -------------------------------------------------------------------------------------


def test_by_name():
    loaded: list[str] = []

    def load(path: str):
        loaded.append(path)
        return ToyModel.random(4, 1), ToyTokenizer(4)

    target = ToyModel.random(4, 0)
    setting = Setting(target, lambda path: pytest.fail("another kind"), ToyTokenizer(4), load)
    build = CrossTokenDrafter.build
    assert build("toy:vocab=4,seed=1", setting).method == "auto"
    assert build("toy:vocab=4,method=slem", setting).method == "slem"
    assert loaded == ["toy:vocab=4,seed=1", "toy:vocab=4"]
    for wrong, match in (("", "needs a draft model"), (",method=tli", "needs a draft"),
                         ("toy,method=text", "no method 'text'")):  # fmt: skip
        with pytest.raises(UsageError, match=match):
            build(wrong, setting)
    with pytest.raises(UsageError, match="no tokenizer"):
        build("toy", Setting(target, setting.load))
    assert len(loaded) == 2


def test_a_recurrent_draft_is_refused():
    draft = ToyModel.random(3, 0)
    draft.rollback = "snapshot"
    with pytest.raises(RollbackError):
        drafter_of(draft, ToyTokenizer(3), ToyTokenizer(3), "tli")


def test_another_tokenizer_hints_here():
    with pytest.raises(TokenizerMismatchError) as caught:
        load_draft("toy:vocab=4", ToyTokenizer(5))
    assert "--drafter crosstoken:toy:vocab=4" in str(caught.value)


def test_toy_options_are_checked():
    with pytest.raises(UnknownNameError):
        Engine.load("toy:vocab=4", drafter="crosstoken:toy:pair=1")


@pytest.mark.parametrize("method", ["tli", "slem"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_says_the_same_with_and_without(method, temperature):
    engine = Engine.load("toy:vocab=4", drafter=f"crosstoken:toy:vocab=6,pairs=2,method={method}")
    how = {"max_tokens": 60, "temperature": temperature, "seed": 4}
    with_it, plain = (engine.generate("abcabd", plain=p, **how) for p in (False, True))
    assert with_it.token_ids == plain.token_ids


# --- real models ---------------------------------------------------------------------------------

PROMPTS = [
    "def fibonacci(n):\n    ",
    "The capital of France is Paris, and the capital of",
    "你好，世界 😀 means",
]


@pytest.mark.slow  # both models are fetched and packed
@pytest.mark.pair
@pytest.mark.model
def test_smollm2_drafts_for_qwen(pair, smollm, capsys):
    target = Engine.load(pair[0], drafter="none")
    drafters = {
        method: CrossTokenDrafter(
            smollm.model, smollm.tokenizer, target.model, target.tokenizer, method=method
        )
        for method in ("tli", "slem")
    }
    for temperature in (0.8, 0.0):
        how = {"max_tokens": 40, "temperature": temperature, "seed": 5}
        plain = [target.generate(prompt, plain=True, **how).token_ids for prompt in PROMPTS]
        for method, drafter in drafters.items():
            made = [target.generate(prompt, drafter=drafter, **how) for prompt in PROMPTS]
            assert [output.token_ids for output in made] == plain
            counts = [output.trace.summary() for output in made]
            accepted, drafted, emitted, calls = (
                sum(count[name] for count in counts)
                for name in ("accepted_tokens", "drafted_tokens", "emitted_tokens", "target_calls")
            )
            with capsys.disabled():
                print(
                    f"\n{method} at temperature {temperature}: {accepted} of {drafted} stand, "
                    f"{emitted / calls:.2f} tokens a target call",
                    flush=True,
                )
            assert accepted
