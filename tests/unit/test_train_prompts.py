"""The bundled prompts: distinct, repeatable, evenly mixed, with every slot filled."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest

from outrider.errors import UsageError
from outrider.train.prompts import bundled_prompts

SOURCE = json.loads(files("outrider.train").joinpath("prompts.json").read_text(encoding="utf-8"))
KINDS = SOURCE["templates"]
SLOT = re.compile(r"\{[a-z_]+\d*(?::\d+-\d+)?\}")


def made_from(prompt: str, template: str) -> bool:
    """Whether the prompt is the template with something in each slot."""
    fixed = [re.escape(part) for part in SLOT.split(template)]
    return re.fullmatch(".+".join(fixed), prompt, re.DOTALL) is not None


def test_the_same_seed_gives_the_same_prompts_and_another_seed_does_not():
    assert bundled_prompts(300, seed=3) == bundled_prompts(300, seed=3)
    assert bundled_prompts(300, seed=3) != bundled_prompts(300, seed=4)


def test_a_larger_count_only_adds_to_the_end():
    assert bundled_prompts(200)[:70] == bundled_prompts(70)


@pytest.mark.parametrize("seed", [0, 1])
def test_six_thousand_are_distinct_and_whole(seed):
    prompts = bundled_prompts(6000, seed)
    assert len(set(prompts)) == 6000
    assert all(prompt == prompt.strip() for prompt in prompts)
    assert not any(SLOT.search(prompt) for prompt in prompts)


def test_the_kinds_come_in_turn():
    prompts = bundled_prompts(50)
    templates = list(KINDS.values())
    assert len(templates) == 11
    for place, prompt in enumerate(prompts):
        assert any(made_from(prompt, template) for template in templates[place % len(templates)])


@pytest.mark.parametrize("count", [0, -1, 1_000_000])
def test_a_count_that_cannot_be_had_is_refused(count):
    with pytest.raises(UsageError, match="bundled set holds"):
        bundled_prompts(count)


def test_all_that_the_message_promises_can_be_had():
    with pytest.raises(UsageError) as refusal:
        bundled_prompts(1_000_000)
    most = int(refusal.value.hint.rstrip(".").split()[-1])
    assert most >= 6000
    assert len(set(bundled_prompts(most))) == most


def test_passages_are_long_enough_to_work_on():
    passages = SOURCE["lists"]["passage"] + [note["text"] for note in SOURCE["notes"]]
    assert len(passages) >= 40
    assert all(40 <= len(passage.split()) <= 200 for passage in passages)
