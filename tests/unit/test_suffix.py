"""The suffix drafter: its index against a search, its trees, its corpus and its store."""

from __future__ import annotations

import gc
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import Engine
from outrider.core.proposal import ROOT
from outrider.drafters.shape import Dynamic, Static
from outrider.drafters.suffix import SuffixAutomaton, SuffixDrafter, read_corpus
from outrider.errors import UnknownNameError, UsageError
from outrider.models.tokenizer import ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.protocols import Setting
from tests.unit.test_drafters import NEVER, proposed

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=4)


# --- the index -----------------------------------------------------------------------------------


def after(texts: list[list[int]], gram: list[int]) -> Counter[int]:
    """What follows a substring, by search."""
    return Counter(
        text[end]
        for text in texts
        for end in range(len(gram), len(text))
        if text[end - len(gram) : end] == gram
    )


def longest_followed(texts: list[list[int]], tokens: list[int], most: int) -> list[int]:
    """The longest suffix, by search, that something follows; the empty one if none does."""
    for size in range(min(most, len(tokens)), 0, -1):
        if after(texts, tokens[-size:]):
            return tokens[-size:]
    return []


@given(TEXTS, st.lists(st.integers(0, 2), max_size=10), st.integers(2, 6), st.integers(0, 14))
def test_the_index_knows_what_a_search_finds(texts, tokens, longest, cut):
    index = SuffixAutomaton(longest)
    for text in texts:
        index.add_text(text[:cut])
        index.extend(text[cut:])
    assert index.size == sum(map(len, texts))
    for query in (tokens, texts[-1] if texts else []):  # a foreign text, and the text's own end
        place, known = index.match(query), longest_followed(texts, query, longest - 1)
        assert place.length == len(known)
        # Down every path, so that the ends of texts are run into as well.
        paths = [(place, known)] if known else []
        for _ in range(longest + 2):
            onward = []
            for place, context in paths:
                counts = after(texts, context)
                found = index.continuations(place, 9)
                total = sum(counts.values())
                assert {c.token: c.share for c in found} == {
                    token: number / total for token, number in counts.items()
                }
                for c in found[:2]:
                    rest = longest_followed(texts, [*context, c.token], longest - 1)
                    if rest:
                        onward.append((c.place, rest))
            paths = onward[:4]


@given(TEXTS, st.integers(2, 6))
def test_the_end_of_a_text_is_known_without_a_search(texts, longest):
    index = SuffixAutomaton(longest)
    for text in texts:
        index.add_text([])
        for n, token in enumerate(text, 1):
            index.extend([token])
            assert index.end() == index.match(text[:n])


@given(TEXTS)
def test_the_commonest_comes_first_and_of_equal_ones_the_latest(texts):
    index = SuffixAutomaton(8)
    for text in texts:
        index.add_text(text)
    place = index.match([0])
    if place.length:
        counts = after(texts, [0])
        whole = [(n, i) for n, text in enumerate(texts) for i in range(1, len(text))]
        latest = {texts[n][i]: (n, i) for n, i in whole if texts[n][i - 1] == 0}
        order = sorted(counts, key=lambda token: (counts[token], latest[token]), reverse=True)
        assert [c.token for c in index.continuations(place, 9)] == order
        assert [c.token for c in index.continuations(place, 1)] == order[:1]


def test_the_index_stays_small_and_one_token_over_and_over_is_no_trouble():
    index = SuffixAutomaton(16)
    index.add_text([0] * 20_000)
    assert index.match([0] * 40).length == 15
    assert len(index._next) <= 2 * index.size


# --- chains --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "length", "wanted"),
    [
        ([1, 2, 3, 9, 1, 2], 2, [3, 9]),
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 9, 1, 2], 99, [3, 9, 1, 2, 3, 9, 1, 2]),  # past the end; 4 for each matched
        ([1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2], 1, [7]),  # the commoner one
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # of equally common ones the later
        ([5, 1, 2, 7, 6, 1, 2, 8, 0, 1, 2, 8, 5, 1, 2], 1, [7]),  # the longer match is rarer
        ([1, 2, 3, 4], 4, []),
        ([4, 4], 9, [4, 4, 4, 4]),
        ([4], 4, []),
        ([], 4, []),
        ([1, 2, 1], 0, []),
        ([1, 2, 1], -1, []),
    ],
)
def test_chains(tokens, length, wanted):
    assert proposed(SuffixDrafter(), tokens, length) == wanted


@pytest.mark.parametrize("factor", [1, 2, 5])
def test_a_proposal_is_bounded_by_its_match(factor):
    text = [1, 2, 3, *range(10, 40), 1, 2, 3]
    assert len(proposed(SuffixDrafter(factor=factor), text, 99)) == 3 * factor


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
def test_growing_and_changed_texts_are_indexed_alike(pieces):
    session = SuffixDrafter().start([], 100)
    text: list[int] = []
    for i, piece in enumerate(pieces):
        text = text[: len(text) - 2] + piece if i % 3 == 2 else text + piece
        assert list(session.propose(text, 4, NEVER).tokens) == proposed(SuffixDrafter(), text, 4)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 4))
def test_a_text_indexed_when_it_is_of_use_proposes_as_one_indexed_at_once(text, shortest):
    drafter = SuffixDrafter(shortest=shortest)
    session = drafter.start(text[:3], 100)
    for end in range(3, len(text) + 1):
        known = longest_followed([text[:end]], text[:end], 31)
        found = session.propose(text[:end], 4, NEVER)
        assert bool(len(found)) == (len(known) >= shortest)
        assert list(found.tokens) == proposed(drafter, text[:end], 4)


def test_a_text_that_repeats_nothing_is_not_indexed(monkeypatch):
    """To index a token takes some 50 µs, and a prompt has many."""
    monkeypatch.setattr(SuffixAutomaton, "extend", None)
    session = SuffixDrafter(shortest=3).start(range(100), 300)
    for end in range(101, 150):
        assert not len(session.propose(range(end), 4, NEVER))


# --- trees ---------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 6),
    st.sampled_from([Static((2,)), Static((3, 2)), Dynamic(1), Dynamic(6, 3), Dynamic(30)]),
)
def test_budget_depth_and_order_of_trees(tokens, length, shape):
    drafter = SuffixDrafter(shape, factor=3)
    tree = drafter.start(tokens, 99).propose(tokens, length, NEVER)
    known = longest_followed([tokens], tokens, 31)
    assert drafter.trees
    assert tree.laws == (None,) * len(tree)
    assert tree.depth <= min(length, 3 * len(known))
    assert bool(known) == (len(tree) > 0)
    if isinstance(shape, Dynamic):
        assert len(tree) <= min(shape.nodes, 3 * len(known))
    worth = {ROOT: 1.0}
    for node in range(len(tree)):
        parent = tree.parents[node]
        path = tree.path_tokens(parent)
        context = longest_followed([tokens], [*known, *path], 31) if path else known
        counts = after([tokens], context)
        worth[node] = worth[parent] * (counts[tree.tokens[node]] / sum(counts.values()))
        assert len(tree.children(parent)) <= shape.width_at(len(path))
    values = [worth[node] for node in range(len(tree))]
    assert values == sorted(values, reverse=True)


def test_a_tree_goes_on_wherever_the_text_did():
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    tree = SuffixDrafter(Dynamic(5)).start(text, 99).propose(text, 2, NEVER)
    assert tree.tokens == (7, 1, 8, 1)
    assert tree.parents == (ROOT, 0, ROOT, 2)


def test_shapes_by_name():
    assert not Engine.load("toy:vocab=4", drafter="suffix").drafter.trees
    engine = Engine.load("toy:vocab=4", drafter="suffix#tree=24")
    assert engine.drafter.shape == Dynamic(24)
    with pytest.raises(UsageError, match="block"):
        engine.generate([0], rule="block", temperature=1.0)
    with pytest.raises(UsageError, match="draft tree"):
        Engine.load("toy:vocab=4", drafter="suffix#bush")


@pytest.mark.parametrize("drafter", ["suffix", "suffix#tree=8", "suffix:store=500#tree=2,2"])
def test_the_same_seed_gives_the_same_text_in_fewer_calls(drafter):
    engine = Engine.load("toy:vocab=5,order=1,sharpness=4", drafter=drafter)
    request = {"max_tokens": 120, "temperature": 0.7, "seed": 3}
    plain = engine.generate([1, 2], plain=True, **request)
    for _ in range(2):
        drafted = engine.generate([1, 2], **request)
        assert drafted.token_ids == plain.token_ids
        assert drafted.trace.summary()["target_calls"] < 120


# --- a corpus ------------------------------------------------------------------------------------


def setting(vocab: int = 20, words: bool = True) -> Setting:
    tokenizer = ToyTokenizer(vocab) if words else None
    return Setting(ToyModel.random(vocab, 0), lambda name: pytest.fail("loads nothing"), tokenizer)


def test_the_longest_match_wins_and_of_equal_ones_the_own_text():
    drafter = SuffixDrafter(corpus=[[1, 2, 3, 4], [6, 7, 8]])
    assert proposed(drafter, [0, 1, 2], 1) == [3]
    assert proposed(drafter, [6, 7], 9) == [8]  # no text runs on into another
    assert proposed(drafter, [2, 9, 1, 2], 1) == [3]
    assert proposed(drafter, [1, 2, 9, 1, 2], 1) == [9]


def test_texts_and_records_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    records = [{"text": "efg"}, {"token_ids": [8, 9, 10], "text": "no"}, {"output": "kl"}]
    lines = "\n\n".join(json.dumps(record) for record in records)
    (tmp_path / "b.jsonl").write_text(f"{lines}\n")
    drafter = SuffixDrafter.build(f"{tmp_path}/a.txt,{tmp_path}/b.jsonl#tree=5", setting())
    assert drafter.shape == Dynamic(5)
    assert drafter.corpus.size == 12
    for tokens, wanted in (([0, 1], (2, 3)), ([4], (5, 6)), ([8], (9, 10, 11)), ([10], (11,))):
        assert drafter.start(tokens, 9).propose(tokens, 4, NEVER).tokens == wanted
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"token_ids": [1, 2]}')
    assert SuffixDrafter.build(str(ids), setting(words=False)).corpus.size == 2


def test_a_file_whose_name_looks_like_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.txt").write_text("abc")
    assert SuffixDrafter.build("a=b.txt", setting()).corpus.size == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n", "is empty"),
        ("empty.jsonl", b'\n{"text": ""}\n', "is empty"),
        ("zeros.txt", b"ab\0c", "is not UTF-8 text"),
        ("bytes.txt", b"\xff\xfe\x80", "is not UTF-8 text"),
        ("no.jsonl", b'{"text": "a"}\n{"prompt": "a"}', "Line 2 .* has no text"),
        ("broken.jsonl", b'{"text": ', "Line 1 .* has no text"),
        ("number.jsonl", b"7", "has no text"),
        ("null.jsonl", b'{"text": null}', "has no text"),
        ("ids.jsonl", b'{"token_ids": [1, 20]}', "holds 20; token ids .* from 0 to 19"),
        ("words.jsonl", b'{"token_ids": ["a"]}', "holds 'a'"),
        ("true.jsonl", b'{"token_ids": [true]}', "holds True"),
        ("greek.txt", "αβγ".encode(), "cannot be made into the target's tokens"),
    ],
)
def test_files_that_are_no_corpus(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        SuffixDrafter.build(str(path), setting())
    assert name in str(caught.value)


def test_what_is_no_file_and_what_has_no_tokenizer(tmp_path):
    with pytest.raises(UsageError, match=r"There is no corpus file 'missing\.txt'"):
        SuffixDrafter.build("missing.txt", setting())
    with pytest.raises(UsageError, match="cannot be read"):
        SuffixDrafter.build(str(tmp_path), setting())
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(UsageError, match="no tokenizer"):
        read_corpus(str(tmp_path / "a.txt"), None, 20)


def test_wrong_options():
    with pytest.raises(UsageError, match=r"no option 'stor'.*Did you mean 'store'"):
        SuffixDrafter.build("stor=5", setting())
    for value in ("", "0", "-3", "many", "1.5"):
        for name in ("store", "match"):
            with pytest.raises(UsageError, match=f"'{name}' is a number of tokens"):
                SuffixDrafter.build(f"{name}={value}", setting())
    for options in (
        {"store_tokens": -1}, {"factor": 0}, {"longest": 1}, {"shortest": 0},
        {"shortest": 9, "longest": 9},
    ):  # fmt: skip
        with pytest.raises(UsageError, match="suffix drafter needs"):
            SuffixDrafter(**options)
    with pytest.raises(UnknownNameError, match="Did you mean 'suffix'"):
        Engine.load("toy", drafter="sufix#tree=4")


def test_a_match_that_is_too_short_is_left_to_another():
    text = [1, 2, 3, 9, 1, 2]
    for shortest, some in ((1, True), (2, True), (3, False)):
        session = SuffixDrafter.build(f"match={shortest}", setting()).start(text, 20)
        assert bool(session.propose(text, 3, pick=None).tokens) == some


# --- the store -----------------------------------------------------------------------------------


def held(drafter: SuffixDrafter) -> int:
    drafter.start([0], 9)
    return sum(index.size for index in drafter.store.generations)


def test_nothing_is_kept_unless_asked_for():
    drafter = SuffixDrafter()
    proposed(drafter, [1, 2, 3, 4], 4)
    assert held(drafter) == 0
    assert proposed(drafter, [1, 2], 4) == []


def test_finished_requests_help_later_ones():
    drafter = SuffixDrafter(store_tokens=100)
    session = drafter.start([1, 2], 9)
    session.propose([1, 2, 3, 4], 4, NEVER)
    assert proposed(drafter, [1, 2], 4) == []  # it is not over
    del session
    assert proposed(drafter, [1, 2], 4) == [3, 4]
    assert proposed(drafter, [1, 2, 7, 1, 2], 1) == [7]  # of equal matches the own text


def test_requests_of_an_engine_are_kept_when_they_are_over():
    engine = Engine.load("toy:vocab=40,order=1", drafter="suffix:store=1000")
    request = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    first, second = (engine.generate([1, 2], **request) for _ in range(2))
    assert second.token_ids == first.token_ids
    calls = [output.trace.summary()["target_calls"] for output in (first, second)]
    assert calls[1] < calls[0] / 2
    before = held(engine.drafter)
    for piece in engine.stream([1, 2], **request):  # one that is broken off
        assert piece.finish_reason is None
        break
    gc.collect()
    assert held(engine.drafter) > before


def test_a_session_under_way_sees_what_a_fresh_one_sees():
    drafter = SuffixDrafter(store_tokens=100)
    early = drafter.start([1, 2], 9)
    drafter.start([1, 2, 3], 9)
    late = drafter.start([1, 2], 9)
    assert early.propose([1, 2], 4, NEVER) == late.propose([1, 2], 4, NEVER)
    assert early.propose([1, 2], 4, NEVER).tokens == (3,)


@pytest.mark.parametrize("name", ["suffix:store=1000", "ngram+suffix:store=1000"])
@pytest.mark.parametrize("max_tokens", [1, 7])
def test_the_store_keeps_the_whole_text_of_a_request(name, max_tokens):
    engine = Engine.load("toy:vocab=40,order=1", drafter=name)
    out = engine.generate([1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
    drafter = engine.drafter if name.startswith("suffix") else engine.drafter.parts[1]
    gc.collect()
    drafter.store.settle()
    (kept,) = drafter.store.generations
    assert kept.size == 3 + len(out.token_ids)
    assert kept.match([2, 3, *out.token_ids[:-1]]).length == 1 + max_tokens


def test_the_store_is_bounded_and_the_oldest_go_first():
    drafter = SuffixDrafter(store_tokens=60)
    for i in range(20):
        drafter.start([100 + i, *range(10 * i, 10 * i + 9)], 99)
        assert held(drafter) <= 60
    assert proposed(drafter, [119], 1) == [190]
    assert proposed(drafter, [100], 1) == []
    drafter.start(list(range(500)), 999)  # longer than the store: its end is kept
    assert held(drafter) <= 60
    assert proposed(drafter, [498], 1) == [499]
    for tokens in (1, 2, 3):
        small = SuffixDrafter(store_tokens=tokens)
        small.start([1, 2, 3, 4], 9)
        assert held(small) <= tokens


def test_many_threads_share_a_store():
    drafter = SuffixDrafter(store_tokens=400)
    texts = [[(i * k) % 11 for i in range(60)] for k in range(1, 9)]

    def request(number: int) -> bool:
        text = texts[number % len(texts)]
        session = drafter.start(text[:5], 99)
        for end in range(5, 60, 3):
            tokens = session.propose(text[:end], 4, NEVER).tokens
            assert all(0 <= token < 11 for token in tokens)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(request, range(64)))
    assert 0 < held(drafter) <= 400
