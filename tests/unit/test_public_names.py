"""Names that scripts outside the project rely on. A change here is a breaking change."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import outrider
from outrider import errors
from outrider.core.trace import Trace
from outrider.registry import DRAFTERS, POLICIES, RULES, RUNTIMES

PUBLIC = {
    "Engine",
    "Grammar",
    "Output",
    "OutriderError",
    "Piece",
    "__version__",
    "speculative_decode_step",
    "transformers_generate",
}

# Children by parent, and the standard exception that each also is.
TREE = {
    "OutriderError": (
        "Exception",
        {"UsageError", "ModelError", "EndpointError", "NumericalError", "ProposalError"},
    ),
    "UsageError": ("ValueError", {"UnknownNameError", "SamplingError", "PromptError", "LogError"}),
    "ModelError": (
        None,
        {
            "ModelNotFoundError",
            "ModelFileError",
            "DownloadError",
            "NotEnoughMemoryError",
            "TokenizerMismatchError",
            "DraftMismatchError",
            "UnsupportedError",
            "RollbackError",
        },
    ),
    "ModelFileError": (None, {"ChecksumError"}),
    "NotEnoughMemoryError": ("MemoryError", set()),
}


def test_public_names():
    assert set(outrider.__all__) == PUBLIC
    assert set(dir(outrider)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name):
    assert getattr(outrider, name) is not None


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = outrider.Engin


def test_the_package_is_light_to_import():
    code = (
        "import sys, outrider; dir(outrider); outrider.__version__; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_exception_tree():
    assert set(errors.__all__) == {"OutriderError"}.union(*(below for _, below in TREE.values()))
    for parent, (standard, children) in TREE.items():
        cls = getattr(errors, parent)
        ours = {c.__name__ for c in cls.__subclasses__() if c.__module__ == "outrider.errors"}
        assert ours == children
        if standard:
            assert issubclass(cls, getattr(import_module("builtins"), standard))


@pytest.mark.parametrize("name", errors.__all__)
def test_every_exception_says_problem_and_hint(name):
    error = getattr(errors, name)("Five were expected; got three.", hint="Add two.")
    assert str(error) == "Five were expected; got three. Add two."
    assert (error.problem, error.hint) == ("Five were expected; got three.", "Add two.")
    assert error.exit_code == (2 if isinstance(error, errors.UsageError) else 1)
    assert name in str(errors.__doc__), "the drawing of the tree lacks it"


def test_names_of_parts():
    """Names may be added; none of these may go."""
    assert {"none", "ngram", "model", "script"} <= set(DRAFTERS)
    assert {"greedy", "rejection", "coupled", "block"} <= set(RULES)
    assert {"toy", "hf"} <= set(RUNTIMES)
    assert {"fixed", "adaptive"} <= set(POLICIES)


def test_names_in_a_trace():
    """Names may be added; none of these may go."""
    assert set(Trace().summary()) >= {
        "drafted_tokens",
        "accepted_tokens",
        "rejected_rounds",
        "target_calls",
        "emitted_tokens",
        "draft_time_ms",
        "verify_time_ms",
        "total_time_ms",
        "ttft_ms",
        "acceptance_rate",
        "tokens_per_target_call",
        "target_calls_per_token",
    }
