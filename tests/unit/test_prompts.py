"""Sets of prompts: the bundled one, and files in every form, good and bad."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from outrider.engine.prompts import PromptRecord, read_prompts
from outrider.errors import PromptError, UsageError

KINDS = {
    "chat", "code", "editing", "extraction", "long", "reasoning", "summarization", "translation",
}  # fmt: skip


def jsonl(tmp_path, *rows, name="set.jsonl"):
    path = tmp_path / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def last_text(record):
    return record.prompt if isinstance(record.prompt, str) else record.prompt[-1]["content"]


def test_the_bundled_set_has_about_a_hundred_distinct_prompts_of_eight_kinds():
    records = read_prompts("bundled")
    counts = Counter(record.kind for record in records)
    assert set(counts) == KINDS
    assert all(12 <= count <= 13 for count in counts.values())
    assert len({record.id for record in records}) == len(records)
    assert len({last_text(record) for record in records}) == len(records)


def test_any_beginning_of_the_bundled_set_is_mixed():
    assert {record.kind for record in read_prompts("bundled")[:8]} == KINDS


def test_bundled_lengths_are_what_their_kinds_promise():
    words = {kind: [] for kind in KINDS}
    for record in read_prompts("bundled"):
        words[record.kind].append(len(last_text(record).split()))
    assert all(150 <= n <= 450 for n in words["summarization"])
    assert min(words["long"]) > max(max(words[kind]) for kind in KINDS - {"long"}) - 150
    shortest, longest = min(words["chat"]), max(words["chat"])
    assert longest > 4 * shortest


def test_a_limit_counts_each_kind(tmp_path):
    rows = [{"prompt": f"{kind}{i}", "task": kind} for i in range(3) for kind in ("a", "b")]
    found = read_prompts(jsonl(tmp_path, *rows), limit=2)
    assert [record.prompt for record in found] == ["a0", "b0", "a1", "b1"]
    assert len(read_prompts("bundled", limit=1)) == len(KINDS)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit):
    with pytest.raises(UsageError, match=f"limit of {limit}"):
        read_prompts("bundled", limit=limit)


def test_lines_of_a_text_file(tmp_path):
    path = tmp_path / "set.txt"
    path.write_bytes("\ufeffone\r\n\r\n  two\u2028still two \nthree".encode())
    assert read_prompts(path) == [
        PromptRecord("1", "text", "one"),
        PromptRecord("3", "text", "  two\u2028still two "),
        PromptRecord("4", "text", "three"),
    ]
    assert read_prompts(str(path)) == read_prompts(path)


def test_forms_of_a_line(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = jsonl(
        tmp_path,
        {"prompt": "P", "category": "c", "task": "t", "id": 7},
        "",
        {"messages": talk, "task": "t"},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"prompt": "a\u2028b", "turns": None, "category": None},
    )
    assert read_prompts(path) == [
        PromptRecord("7", "c", "P"),
        PromptRecord("3", "t", talk),
        PromptRecord("81", "writing", [{"role": "user", "content": "first"}]),
        PromptRecord("5", "all", "a\u2028b"),
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"prompt": ', "not JSON"),
        ("[1]", "an object was expected"),
        ({"text": "x"}, "neither 'prompt' nor 'messages' nor 'turns'"),
        ({"prompt": " \n"}, "'prompt' is empty"),
        ({"prompt": 3}, "'prompt' must be a text"),
        ({"turns": []}, "'turns' is a list"),
        ({"turns": "x"}, "'turns' is a list"),
        ({"turns": [""]}, "the first of 'turns' is empty"),
        ({"messages": []}, "'messages' is a list"),
        ({"messages": ["x"]}, "a 'role' and a 'content'"),
        ({"messages": [{"role": "user"}]}, "a 'role' and a 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "a 'role' and a 'content'"),
        ({"messages": [{"role": "user", "content": ""}]}, "the last message is empty"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, row, told):
    path = jsonl(tmp_path, {"prompt": "good"}, "", row)
    with pytest.raises(PromptError, match="Line 3 of ") as caught:
        read_prompts(path)
    assert told in caught.value.problem
    assert str(path) in caught.value.problem
    assert "bundled" in caught.value.hint


def test_a_bad_line_is_told_even_where_the_limit_would_leave_it_out(tmp_path):
    with pytest.raises(PromptError, match="Line 2"):
        read_prompts(jsonl(tmp_path, {"prompt": "good"}, {"prompt": ""}), limit=1)


def test_files_that_hold_nothing_or_cannot_be_read(tmp_path):
    with pytest.raises(PromptError, match="cannot be read as prompts: No such file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(PromptError, match="cannot be read as prompts: Is a directory"):
        read_prompts(tmp_path)
    with pytest.raises(PromptError, match="holds no prompts"):
        read_prompts(jsonl(tmp_path, "", " "))
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(PromptError, match="not UTF-8"):
        read_prompts(tmp_path / "latin")
