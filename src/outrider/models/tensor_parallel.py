"""A target that is larger than one device: its matrices are cut among processes.

Each process holds some heads of every layer and a part of every feed-forward matrix, as the
model's own plan in transformers says, and adds its part of each sum to the others'. The first
process leads: to the engine its model is a model like any other. The others hold their part of
the weights and of the caches, and go through the same passes.
"""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from outrider.core.proposal import Proposal
from outrider.errors import OutriderError, UnsupportedError
from outrider.models.adapter import Adapter
from outrider.models.heads.eagle import EagleModule, TorchHead
from outrider.models.heads.medusa import MedusaModule, TorchMedusa
from outrider.models.hf import (
    HFModel,
    default_dtype,
    eos_token_ids,
    load_words,
    loading,
    whole_module,
)
from outrider.models.hf_cache import HFCache
from outrider.models.hf_layers import SomeLayers
from outrider.models.line import Line, line
from outrider.models.locate import Located
from outrider.models.memory import check_bytes, facts
from outrider.models.numerics import row_step
from outrider.models.tokenizer import HFTokenizer
from outrider.protocols import Progress

__all__ = ["Lead", "load"]

_NO_STEP = 1 << 20


def load(
    located: Located, *, dtype: torch.dtype | None = None, device: str = "tp"
) -> tuple[Lead, HFTokenizer]:
    """Spread a target over the processes that torchrun started.

    In the first process it returns the model that leads the others. In the others it does not
    return: they serve the lead until it is done, and end.

    Parameters
    ----------
    located
        A folder or a hub repository.
    dtype
        Of weights and activations; by default that of the ``hf`` runtime.

    Raises
    ------
    UnsupportedError
        When its family has no plan, its heads cannot be shared out evenly, or it is a GGUF file
        or has an adapter.
    ModelFileError, ModelNotFoundError, NotEnoughMemoryError
        As in the ``hf`` runtime.
    """
    wire = line()
    if not wire.lead:
        _follow(wire)
    _check(located)
    kind = dtype or default_dtype("cuda" if torch.cuda.is_available() else "cpu")
    if not torch.cuda.is_available() and (found := facts(located)) is not None:
        # Processes on one machine take their memory from the same place.
        check_bytes(found.weights_bytes(kind), located.name)
    number, source = wire.number(), str(located.path or located.repo)
    what = {"source": source, "kind": located.kind, "name": located.name, "dtype": str(kind)}
    with wire.saying("load", number=number, **what):
        model = _load(wire, **what)
    words = load_words(source, source)
    tokenizer = HFTokenizer(words, eos_token_ids(model.module))
    return Lead(model, wire, number, tokenizer.vocab_size), tokenizer


def _check(located: Located) -> None:
    if located.kind == "gguf":
        raise UnsupportedError(
            f"'{located.name}' is a GGUF file, which is not spread over processes.",
            hint="Give a transformers folder.",
        )
    if located.adapter is not None:
        raise UnsupportedError(
            f"'{located.name}' is to be spread over processes, which takes no adapter.",
            hint="Merge the adapter into a folder of its own, and give that.",
        )


def _load(wire: Line, source: str, kind: str, name: str, dtype: str) -> HFModel:
    """This process's part, in every process at once; all come to the same errors."""
    located = Located(cast(Any, kind), name, Path(source) if kind == "folder" else None, source)
    count = dist.get_world_size()
    with loading(located):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _check_plan(config.get_text_config(decoder=True), name, count)
        module = whole_module(
            source,
            dtype=getattr(torch, dtype.removeprefix("torch.")),
            use_safetensors=True,
            distributed_config=DistributedConfig(tp_size=count),
        )
    model = HFModel(module, name=name)
    model.keep_numbers(lambda whole: _agreed_step(wire, whole))
    return model


def _check_plan(config: Any, name: str, count: int) -> None:
    if not config.base_model_tp_plan:
        raise UnsupportedError(
            f"transformers has no plan to spread '{name}' ({config.model_type}) over processes.",
            hint="Use a model of another family, or one process.",
        )
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % count or keys % count:
        raise UnsupportedError(
            f"'{name}' has {heads} query heads and {keys} key heads, which {count} processes "
            "cannot share out evenly.",
            hint="Start a number of processes that divides both.",
        )


def _agreed_step(wire: Line, module: nn.Module) -> int | None:
    """The row step that serves all processes, each of which has other slices to measure."""
    slices = nn.ModuleList(_bare(part) for part in module.modules() if isinstance(part, nn.Linear))
    step = wire.most(row_step(slices) or _NO_STEP)
    return None if step == _NO_STEP else step


def _bare(layer: nn.Linear) -> nn.Linear:
    """The slice of a linear layer that is here, without the sums over processes."""
    made = nn.Linear(1, 1, bias=layer.bias is not None, device="meta")
    weight, bias = (_local(value) for value in (layer.weight, layer.bias))
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.out_features, made.in_features = weight.shape
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


class _Leading(HFModel):
    """Passes that all processes go through."""

    _wire: Line
    _number: int

    def prefill(
        self, cache: HFCache, tokens: Sequence[int], progress: Progress | None = None
    ) -> None:
        """Feed tokens in chunks, no logits wanted."""
        with self._wire.saying("prefill", model=self._number, **_fed(cache, tokens)):
            super().prefill(cache, tokens, progress)

    def score(
        self, cache: HFCache, tokens: Sequence[int], proposal: Proposal
    ) -> Float[Tensor, "rows V"]:
        """Logits after the last of ``tokens`` and after each node of a tree, in one pass."""
        tree = [list(map(int, proposal.tokens)), list(proposal.parents)]
        with self._wire.saying("score", model=self._number, tree=tree, **_fed(cache, tokens)):
            return super().score(cache, tokens, proposal)


def _fed(cache: HFCache, tokens: Sequence[int]) -> dict[str, Any]:
    assert isinstance(cache, LeadCache)
    return {"cache": cache.number, "tokens": list(map(int, tokens))}


class Lead(_Leading):
    """The target as the engine sees it; what it does, all processes do.

    Parameters
    ----------
    part
        The part of it that this process holds.
    wire
        To the others.
    number
        Its name among the processes.
    vocab_size
        Number of real tokens.
    """

    def __init__(self, part: HFModel, wire: Line, number: int, vocab_size: int) -> None:
        vars(self).update(vars(part))
        self._wire, self._number = wire, number
        self.vocab_size = min(part.vocab_size, vocab_size)

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> LeadCache:
        """An empty cache, of which each process has the part for its heads."""
        number = self._wire.number()
        with self._wire.saying("new_cache", model=self._number, number=number, taps=list(taps)):
            return LeadCache(super().new_cache(capacity, taps), self._wire, number)

    def make_head(self, module: EagleModule | MedusaModule) -> TorchHead | TorchMedusa:
        """A draft head in this process, on the hidden states of all."""
        if isinstance(module, MedusaModule):
            return TorchMedusa(module)

        def rows(tokens: Sequence[int]) -> Float[Tensor, "n d"]:
            ids = list(map(int, tokens))
            with self._wire.saying("embed", model=self._number, tokens=ids):
                return _embed(self, ids).float().cpu()

        return TorchHead(module, rows)

    def some_layers(self, layers: Sequence[int]) -> HFModel:
        """Some layers alone, in the same caches."""
        number = self._wire.number()
        what = {"model": self._number, "layers": list(layers)}
        with self._wire.saying("some_layers", number=number, **what):
            return _LeadSome(self, layers, number)

    def with_adapter(self, adapter: Adapter | None) -> HFModel:
        """There are no adapters here."""
        raise UnsupportedError(
            f"'{self.name}' is spread over processes, which takes no adapter.",
            hint="Leave --adapter and --adapter-mode out.",
        )


class _LeadSome(_Leading, SomeLayers):
    def __init__(self, whole: Lead, layers: Sequence[int], number: int) -> None:
        super().__init__(whole, layers)
        self._number = number


class LeadCache(HFCache):
    """A sequence's cache: the others move theirs as this one is moved."""

    def __init__(self, part: HFCache, wire: Line, number: int) -> None:
        vars(self).update(vars(part))
        self.number, self._wire = number, wire
        weakref.finalize(self, wire.gone.append, number)

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keep ``base`` tokens and a path of the nodes behind them."""
        what = {"base": base, "path": list(path)}
        with self._wire.saying("keep", cache=self.number, **what):
            super().keep(base, path)

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        with self._wire.saying("rollback", cache=self.number, length=length):
            super().rollback(length)


@torch.inference_mode()
def _embed(model: HFModel, tokens: Sequence[int]) -> Tensor:
    found: Tensor = model.module.get_input_embeddings()(torch.tensor(tokens, device=model.device))
    return found


def _follow(wire: Line) -> NoReturn:
    """Do what the lead does until it is done; what comes of it is the lead's to tell."""
    for word in (signal.SIGINT, signal.SIGTERM):
        signal.signal(word, signal.SIG_IGN)  # the lead says when to end
    held = _Held(wire)
    while (told := wire.hear())["do"] != "end":
        for number in told.pop("gone"):
            held.things.pop(number, None)
        do: Callable[..., None] = getattr(held, told.pop("do"))
        with suppress(OutriderError):  # the lead has come to the same, and tells it
            do(**told)
    dist.destroy_process_group()
    raise SystemExit(0)


class _Held:
    """What one of the other processes holds, by number, and the lead's commands on it."""

    def __init__(self, wire: Line) -> None:
        self._wire = wire
        self.things: dict[int, Any] = {}

    def load(self, number: int, **what: str) -> None:
        self.things[number] = _load(self._wire, **what)

    def some_layers(self, number: int, model: int, layers: list[int]) -> None:
        self.things[number] = SomeLayers(self.things[model], layers)

    def new_cache(self, number: int, model: int, taps: list[int]) -> None:
        self.things[number] = self.things[model].new_cache(1, tuple(taps))

    def prefill(self, model: int, cache: int, tokens: list[int]) -> None:
        self.things[model].prefill(self.things[cache], tokens)

    def score(self, model: int, cache: int, tokens: list[int], tree: list[list[int]]) -> None:
        drafted, parents = tree
        proposal = Proposal(tuple(drafted), tuple(parents), (None,) * len(drafted))
        self.things[model].score(self.things[cache], tokens, proposal)

    def embed(self, model: int, tokens: list[int]) -> None:
        _embed(self.things[model], tokens)

    def keep(self, cache: int, base: int, path: list[int]) -> None:
        self.things[cache].keep(base, path)

    def rollback(self, cache: int, length: int) -> None:
        self.things[cache].rollback(length)
