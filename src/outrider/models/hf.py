"""The ``hf`` runtime: any causal language model of transformers, on a CPU or a GPU."""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn

from outrider.core.proposal import Proposal
from outrider.errors import (
    ModelError,
    ModelFileError,
    ModelNotFoundError,
    OutriderError,
    ProposalError,
    UnsupportedError,
)
from outrider.models import attention, catalogue, memory
from outrider.models.activations import switch_activations
from outrider.models.adapter import Adapter, LiveAdapter, merge_into, read_adapter
from outrider.models.heads.eagle import EagleModule, TorchHead
from outrider.models.heads.medusa import MedusaModule, TorchMedusa
from outrider.models.hf_cache import GROW_BY, HFCache, continues_from_state, rollback_of
from outrider.models.hidden import Hidden, check_taps
from outrider.models.locate import Located
from outrider.models.numerics import row_step
from outrider.models.tokenizer import HFTokenizer
from outrider.protocols import Progress, Rollback

__all__ = [
    "HFModel",
    "default_device",
    "default_dtype",
    "eos_token_ids",
    "first_line",
    "load",
    "load_words",
    "loading",
    "quiet",
    "whole_module",
]

_PREFILL_CHUNK = 512
_NO_LIMIT = 1 << 20


class HFModel:
    """A transformers model that scores blocks of positions.

    Parameters
    ----------
    module
        A causal language model. It computes in evaluation mode; if it is in training mode, it is
        put back into that after each pass.
    name
        What to call it.
    vocab_size
        Number of real tokens, where it is known to be fewer than the rows of the output matrix.
    same_numbers
        Run it so that a row's numbers do not depend on its company: with the attention of
        ``outrider.models.attention``, the functions of ``outrider.models.activations``, and passes
        padded to a whole number of row steps. It switches parts of the module, so it is left off
        for a module that belongs to someone else.

    Raises
    ------
    ModelError
        When the module is not a decoder-only language model with a cache of transformers' kind.
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str = "",
        vocab_size: int | None = None,
        same_numbers: bool = False,
    ) -> None:
        config = module.config
        if getattr(config, "is_encoder_decoder", False) or not module.can_generate():
            raise ModelError(
                f"{type(module).__name__} is not a decoder-only language model.",
                hint="Speculative decoding needs a causal language model (AutoModelForCausalLM).",
            )
        accepted = inspect.signature(module.forward).parameters
        if "cache" not in accepted:
            raise ModelError(
                f"{type(module).__name__} does not take transformers' cache.",
                hint="Use a model of another family.",
            )
        self.module = module
        self.name = name or config.name_or_path or type(module).__name__
        text = config.get_text_config(decoder=True)
        self.config = text
        rows = module.get_output_embeddings().weight.shape[0]
        self.vocab_size = min(rows, vocab_size or rows)
        self.context_length = int(getattr(text, "max_position_embeddings", None) or _NO_LIMIT)
        self.layers = int(text.num_hidden_layers)
        self.hidden_size = int(text.hidden_size)
        self.rollback: Rollback = rollback_of(text)
        self._live: LiveAdapter | None = None
        self._steps: tuple[int | None, ...] = (None,)
        if same_numbers:
            self.keep_numbers(row_step)
        with _evaluating(module):
            # Some decoders say False too, so it is a reason to look and no more.
            if getattr(text, "is_decoder", None) is False and _looks_ahead(module):
                raise ModelError(
                    f"{type(module).__name__} is set up as an encoder: it reads ahead.",
                    hint="Give a causal language model; of this family, one with is_decoder=true.",
                )
            self._continues = self.rollback != "snapshot" or continues_from_state(module)
        self._trims_logits = "logits_to_keep" in accepted
        self._takes_positions = "position_ids" in accepted
        # A branch needs a mask of its own, and a cache that its rows can be picked out of.
        self.trees = (
            HFCache(text).is_plain
            and self._takes_positions
            and text._attn_implementation in (attention.NAME, "sdpa", "eager")
        )

    def keep_numbers(self, measure: Callable[[nn.Module], int | None]) -> None:
        """Run the module so that a row's numbers do not depend on its company, where it can be.

        ``measure`` finds the row step of its matrices, as ``numerics.row_step`` does.
        """
        if self.rollback == "length" and _can_switch_attention(self.module):
            self.module.set_attn_implementation(attention.NAME)
            if self.device.type == "cpu":
                switch_activations(self.module)
            self._steps = (measure(self.module),)

    @property
    def row_step(self) -> int | None:
        """Passes are padded to a multiple of so many rows, each then treated alike; ``None`` where
        that is not kept."""
        steps = [step for step in self._steps if step is not None]
        return max(steps) if len(steps) == len(self._steps) else None

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter beside the weights; one that was merged into them is none."""
        return None if self._live is None else self._live.adapter

    def with_adapter(self, adapter: Adapter | None) -> HFModel:
        """Another model on the same weights: with this adapter beside them, or with none.

        Nothing is copied, and this model stays as it is. Their caches are no use to each other.

        Raises
        ------
        ModelFileError
            When the adapter was made for another base.
        """
        made = copy.copy(self)
        made._live = None if adapter is None else LiveAdapter(self.module, adapter)
        halves = [] if made._live is None or self._steps[0] is None else [made._live.halves]
        made._steps = (self._steps[0], *map(row_step, halves))
        return made

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        device: torch.device = self.module.get_input_embeddings().weight.device
        return device

    @property
    def kind(self) -> str:
        """Precision of the weights."""
        return str(self.module.dtype).removeprefix("torch.")

    def new_cache(self, capacity: int, taps: tuple[int, ...] = ()) -> HFCache:
        """An empty cache; it grows by itself, so the capacity is not reserved.

        ``taps`` are layers whose hidden states are set aside in it.
        """
        check_taps(taps, self.layers, self.name)
        hidden = Hidden(taps, self.hidden_size)
        if self.config._attn_implementation == attention.NAME:
            return HFCache(self.config, attention.visible_keys, hidden)
        return HFCache(self.config, hidden=hidden)

    def cache_bytes(self, tokens: int) -> int:
        """Memory for the keys and values of so many tokens, were each layer to see all of them."""
        c = self.config
        heads = getattr(c, "num_attention_heads", 0)
        kv_heads = getattr(c, "num_key_value_heads", None) or heads
        width = getattr(c, "head_dim", None) or (c.hidden_size // heads if heads else 0)
        held = -(-tokens // GROW_BY) * GROW_BY
        return int(2 * self.layers * kv_heads * width * held * self.module.dtype.itemsize)

    def make_head(self, module: EagleModule | MedusaModule) -> TorchHead | TorchMedusa:
        """A draft head on this model's hidden states."""
        if isinstance(module, MedusaModule):
            return TorchMedusa(module)
        embed = self.module.get_input_embeddings()

        def rows(tokens: Sequence[int]) -> Float[Tensor, "n d"]:
            ids = torch.tensor(tokens, device=self.device)
            found: Tensor = embed(ids).float().cpu()
            return found

        return TorchHead(module, rows)

    def some_layers(self, layers: Sequence[int]) -> HFModel:
        """Some layers alone, in the same caches."""
        from outrider.models.hf_layers import SomeLayers  # which is built on this module

        return SomeLayers(self, layers)

    def prefill(
        self, cache: HFCache, tokens: Sequence[int], progress: Progress | None = None
    ) -> None:
        """Feed tokens in chunks, no logits wanted."""
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            self._forward(cache, tokens[start : start + _PREFILL_CHUNK], 1)
            cache.settle()
            if progress is not None:
                progress(min(start + _PREFILL_CHUNK, len(tokens)), len(tokens))

    def score(
        self, cache: HFCache, tokens: Sequence[int], proposal: Proposal
    ) -> Float[Tensor, "rows V"]:
        """Logits after the last of ``tokens`` and after each node of a tree, in one pass.

        A chain's rows are the same bits in any pass, where ``row_step`` is set. A tree's agree
        with them to rounding: the gaps between a path's keys change the order of sums.
        """
        branches = None if proposal.is_chain else proposal
        if branches is not None and not self.trees:
            raise ProposalError(
                f"'{self.name}' scores chains; a tree with branches was proposed.",
                hint="Use a drafter that proposes chains.",
            )
        if len(proposal):
            cache.save()
        return self._forward(cache, [*tokens, *proposal.tokens], 1 + len(proposal), branches)

    @torch.inference_mode()
    def _forward(
        self, cache: HFCache, ids: Sequence[int], wanted: int, tree: Proposal | None = None
    ) -> Float[Tensor, "wanted V"]:
        beside = nullcontext() if self._live is None else self._live.beside()
        with _evaluating(self.module), beside:
            if self._continues or not cache.length:
                return self._pass(cache, ids, wanted, tree)
            return torch.cat([self._pass(cache, [token], 1) for token in ids])[-wanted:]

    def _pass(
        self, cache: HFCache, ids: Sequence[int], wanted: int, tree: Proposal | None = None
    ) -> Float[Tensor, "wanted V"]:
        step = (self.row_step or 1) if cache.is_plain else 1
        pad = -len(ids) % step
        n = len(ids) + pad
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([[*ids, *[0] * pad]], device=self.device),
            "cache": cache.layers,
            "use_cache": True,
        }
        if self._takes_positions:
            positions = torch.arange(cache.length, cache.length + n, device=self.device)
            if tree is not None:
                before = len(ids) - len(tree)
                depths = torch.tensor([len(tree.path(node)) for node in range(len(tree))])
                positions[before : len(ids)] = (positions[before] - 1 + depths).to(self.device)
                inputs["attention_mask"] = self._tree_mask(cache, before, tree, n)
            # A padding row must not look up a position that the model does not have.
            positions[len(ids) :] = 0
            inputs["position_ids"] = positions[None]
        if self._trims_logits:
            inputs["logits_to_keep"] = min(n, -(-(wanted + pad) // step) * step)
        with _tapping(self.module, cache.hidden.taps) as found:
            logits: Tensor = self.module(**inputs).logits[0]
        if found:
            rows = torch.cat([found[tap][0, : len(ids)].float().cpu() for tap in found], dim=-1)
            cache.hidden.put(cache.length, rows)
        if pad:
            cache.layers.crop(-pad)
        cache.fed(len(ids))
        end = len(logits) - pad
        return logits[end - wanted : end, : self.vocab_size]

    def _tree_mask(
        self, cache: HFCache, before: int, tree: Proposal, n: int
    ) -> Float[Tensor, "1 1 rows C"]:
        """Each node sees the context and its own path; the ``before`` tokens are a chain."""
        start = cache.length
        seen = torch.zeros(n, cache.shown(start + n), dtype=torch.bool)
        seen[:, :start] = True
        seen[:, start : start + n] = torch.ones(n, n, dtype=torch.bool).tril()
        nodes = slice(start + before, start + n)
        for node in range(len(tree)):
            seen[before + node, nodes] = False
            seen[before + node, [start + before + step for step in tree.path(node)]] = True
        mask = seen[None, None].to(self.device)
        if self.config._attn_implementation == attention.NAME:
            return attention.fold(mask, self.module.dtype, self.config)
        hidden = torch.finfo(self.module.dtype).min
        return torch.zeros_like(mask, dtype=self.module.dtype).masked_fill_(~mask, hidden)


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """No dropout for the moment; a module that someone trains is put back as it was."""
    if not module.training:
        yield
        return
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@torch.inference_mode()
def _looks_ahead(module: Any) -> bool:
    device = module.get_input_embeddings().weight.device
    one, other = (
        module(torch.tensor([ids], device=device)).logits[0, 0] for ids in ((0, 1), (0, 2))
    )
    return not torch.equal(one, other)


@contextmanager
def _tapping(module: Any, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What some layers hand on during a pass, by layer and in the order of ``taps``."""
    found: dict[int, Tensor] = dict.fromkeys(taps, torch.empty(0))
    hooks = []

    def keep(tap: int) -> Any:
        def hook(_layer: Any, _inputs: Any, out: Any) -> None:
            found[tap] = out[0] if isinstance(out, tuple) else out

        return hook

    try:
        layers = module.get_decoder().layers if found else []
        hooks = [layers[tap].register_forward_hook(keep(tap)) for tap in found]
        yield found
    finally:
        for made in hooks:
            made.remove()


def _can_switch_attention(module: Any) -> bool:
    config = module.config.get_text_config(decoder=True)
    return (
        config._attn_implementation == "sdpa"
        and module._can_set_attn_implementation()
        and not getattr(config, "attn_logit_softcapping", None)
    )


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device computes with it at full speed, float32 elsewhere."""
    if device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def quiet() -> Iterator[None]:
    """transformers writes progress bars and advice to the terminal that the caller draws on."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        # The GGUF reader's own bar has no switch.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def load(
    located: Located, *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[HFModel, HFTokenizer]:
    """The runtime's entry: a model and its tokenizer from a file, a folder or a hub repository.

    Parameters
    ----------
    located
        Where the weights are. A GGUF file is dequantized, since its packed form is slow here,
        and the result is kept in the cache: reading a GGUF file takes ten times as long.
    dtype
        Of weights and activations; by default ``default_dtype``.
    device
        Such as ``cpu`` or ``cuda:0``; by default the first GPU if there is one.

    Raises
    ------
    UnsupportedError
        When the dtype is one of whole numbers.
    ModelFileError
        When the files are broken or of a kind that transformers cannot load.
    ModelNotFoundError
        When a hub repository does not exist or cannot be reached.
    NotEnoughMemoryError
        When the weights do not fit; raised before they are read.

    An adapter is merged into the weights. No code of a model repository is run, and no pickled
    weights are loaded.
    """
    device = device or default_device()
    dtype = dtype or default_dtype(device)
    if not dtype.is_floating_point:
        raise UnsupportedError(
            f"transformers computes with floats; got --dtype {str(dtype).removeprefix('torch.')}.",
            hint="Use --dtype bfloat16 or float32, or a model that the native runtime runs "
            "(outrider models info NAME).",
        )
    adapter = None if located.adapter is None else read_adapter(located.adapter)
    if device == "cpu":
        memory.check_weights(_cheapest(located, dtype), dtype)
    with loading(located):
        if located.kind == "gguf":
            assert located.path is not None
            module, words = _from_gguf(located.path, dtype)
        else:
            module, words = _from_pretrained(str(located.path or located.repo), dtype)
    if located.kind == "gguf" and located.path is not None:
        _keep_unpacked(module, words, _unpacked_folder(located.path, dtype))
    if adapter is not None:
        merge_into(module, adapter)
    try:
        module = module.to(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each kind of device has its own way to be missing
        raise ModelError(
            f"'{located.name}' could not be moved to the device '{device}': {first_line(error)}",
            hint="Choose another --device.",
        ) from error
    tokenizer = HFTokenizer(words, eos_token_ids(module))
    model = HFModel(module, name=located.name, vocab_size=tokenizer.vocab_size, same_numbers=True)
    return model, tokenizer


@contextmanager
def loading(located: Located) -> Iterator[None]:
    """Tells what transformers' loaders meet as errors of a model, and keeps them quiet."""
    try:
        with quiet():
            yield
    except (torch.OutOfMemoryError, OutriderError):
        raise
    except Exception as error:  # transformers raises whatever its many loaders meet
        reason = first_line(error)
        if located.kind == "hub" and isinstance(error, OSError):
            raise ModelNotFoundError(
                f"The hub repository '{located.repo}' could not be read: {reason}",
                hint="Check the name and the network, or give a local folder or .gguf file.",
            ) from error
        raise ModelFileError(
            f"'{located.path or located.repo}' could not be loaded as a language model: {reason}",
            hint="Is the file whole, and of a family that transformers knows?",
        ) from error


def _from_pretrained(source: str | Path, dtype: torch.dtype) -> tuple[Any, Any]:
    module = whole_module(source, dtype=dtype, use_safetensors=True)
    return module, load_words(source, source)


def load_words(where: str | Path, source: str | Path, **options: Any) -> Any:
    """A tokenizer that transformers did not have to make up."""
    try:
        words = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, **options
        )
        if set(words.get_vocab()) <= set(words.all_special_tokens):
            raise ValueError("it has no words.")
    except Exception as error:  # each kind of tokenizer has its own ways to fail
        raise ModelFileError(
            f"The tokenizer files of '{where}' are missing or broken: {first_line(error)}",
            hint="Copy tokenizer.json and tokenizer_config.json beside the weights, or fetch the "
            "model again.",
        ) from error
    return words


def first_line(error: Exception) -> str:
    """The first line of what some library says."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def whole_module(source: str | Path, **options: Any) -> Any:
    """A model none of whose weights transformers had to make up."""
    module, found = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told below, by name
        **options,
    )
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ValueError(f"tensor '{name}' is {list(stored)}; {list(expected)} was expected.")
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"it lacks {len(missing)} of {len(module.state_dict())} tensors, first '{missing[0]}'."
        )
    return module


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Dequantize a GGUF file, or load what an earlier call made of it."""
    unpacked = _unpacked_folder(path, dtype)
    if _is_whole(unpacked):
        return _from_pretrained(unpacked, dtype)
    module = whole_module(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    return module, load_words(path, path.parent, gguf_file=path.name)


def _keep_unpacked(module: Any, words: Any, unpacked: Path) -> None:
    """Save a dequantized model for the next time; where it cannot be, the next time is slow."""
    if _is_whole(unpacked):
        return
    size_bytes = sum(p.nbytes for p in module.parameters())
    try:
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(unpacked.parent).free <= 4 * size_bytes:
            return
        with quiet(), tempfile.TemporaryDirectory(dir=unpacked.parent, prefix=".part-") as part:
            module.save_pretrained(part)
            words.save_pretrained(part)
            # Renamed in one step, so that a folder with this name is always whole; a second
            # process that was as quick has written the same.
            with suppress(OSError):
                Path(part).rename(unpacked)
                Path(part).mkdir()
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"The unpacked model could not be kept in '{unpacked.parent}', so it is unpacked each "
            f"time: {first_line(error).rstrip('.')}. Set OUTRIDER_CACHE to a folder that can be "
            "written to.",
            stacklevel=2,
        )


def _cheapest(located: Located, dtype: torch.dtype) -> Located:
    """The same weights where their header is quick to read."""
    if located.kind == "gguf" and located.path is not None:
        unpacked = _unpacked_folder(located.path, dtype)
        if _is_whole(unpacked):
            return Located("folder", located.name, path=unpacked)
    return located


def _is_whole(unpacked: Path) -> bool:
    with suppress(OSError):  # no right to look
        return (unpacked / "config.json").is_file()
    return False


def _unpacked_folder(path: Path, dtype: torch.dtype) -> Path:
    """Named after the file's place, length and time, and the code that reads it."""
    stat = path.stat()
    parts = (path.resolve(), stat.st_size, stat.st_mtime_ns, dtype, transformers.__version__)
    key = hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]
    return catalogue.cache_folder() / "unpacked" / f"{path.stem}-{key}"


def eos_token_ids(module: Any) -> list[int]:
    """The end tokens that a model's generation settings name."""
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    return [] if ends is None else ends if isinstance(ends, list) else [ends]
