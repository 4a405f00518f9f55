"""Weights lie side by side, in memory that has huge pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from outrider.models.native.arena import arena, gathered
from outrider.models.native.weights import pack


def flags_at(address: int) -> set[str]:
    """How Linux maps the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(address)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_huge_pages_are_asked_for_where_they_are_given():
    """What could be shared with other processes has small pages only, unless Linux is set up."""
    made = arena({"a": (torch.float32, torch.Size([1 << 20]))})["a"]
    flags = flags_at(made.data_ptr() + 4096)
    assert "sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def test_tensors_of_an_arena_are_zero_apart_and_aligned():
    kinds = {"a": (torch.int8, torch.Size([3])), "b": (torch.float32, torch.Size([2, 5]))}
    made = arena(kinds)
    assert {name: (t.dtype, t.shape) for name, t in made.items()} == kinds
    assert not any(tensor.any() for tensor in made.values())
    made["a"].fill_(7)
    assert not made["b"].any()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made.values())


def test_what_is_gathered_is_the_same_elsewhere():
    layers = tuple(pack(torch.randn(40, 70), None, kind) for kind in ("int8", "float32"))
    moved = gathered(layers)
    places = []
    for old, new in zip(layers, moved, strict=True):
        assert (old.kind, old.outputs) == (new.kind, new.outputs)
        for name in ("weight", "scales", "sums", "bias"):
            one, other = getattr(old, name), getattr(new, name)
            assert torch.equal(one, other)
            assert one.data_ptr() != other.data_ptr()
            places.append(other.data_ptr())
    assert places == sorted(places)
