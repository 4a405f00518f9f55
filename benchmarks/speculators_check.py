"""An exported head in the hands of the ``speculators`` library: its parser, its layer, its logits.

    pip download speculators==0.9.0 --no-deps && unzip speculators-*.whl -d speculators-source
    pip install --no-deps --target speculators-source pydantic-settings loguru
    python -m benchmarks.speculators_check --source speculators-source

The library wants older transformers and packages that have nothing to do with a head's layer, so
its modules are read from an unpacked wheel, without the package's own imports.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.nn.functional as F

from outrider.models.heads.eagle import EagleConfig, EagleModule
from outrider.models.heads.export import export_speculators
from outrider.models.heads.folder import read_head, write_head

TOKENS = 24


def a_head(norm_before_residual: bool) -> EagleModule:
    """Random weights, grouped keys, a trimmed vocabulary in no order."""
    torch.manual_seed(3)
    module = EagleModule(
        EagleConfig(64, (1, 3, 5), 4, 2, 16, 96, 40, 100, 5000.0, 1e-5, norm_before_residual)
    )
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.ndim == 1))
    module.ids.copy_(torch.randperm(100)[:40].sort().values)
    return module


def packages(source: Path) -> None:
    """Empty packages over the library's folders, so that single modules can be imported."""
    sys.path.insert(0, str(source))
    for name in ("speculators", "speculators.models", "speculators.models.eagle3"):
        package = types.ModuleType(name)
        package.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = package
    import speculators.config as config

    sys.modules["speculators"].SpeculatorModelConfig = config.SpeculatorModelConfig  # type: ignore[attr-defined]


@torch.no_grad()
def difference(folder: Path) -> float:
    """The largest difference of both sides' logits on one random text."""
    from safetensors.torch import load_file
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.model_definitions import LlamaDecoderEagle3FirstLayer
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    Eagle3SpeculatorConfig.model_rebuild(_types_namespace={"torch": torch})
    parsed = Eagle3SpeculatorConfig.from_pretrained(folder)
    sizes = parsed.transformer_layer_config
    sizes._attn_implementation = "eager"
    w = load_file(folder / "model.safetensors")
    layer = LlamaDecoderEagle3FirstLayer(sizes, 0, parsed.norm_before_residual).eval()
    own = {k.removeprefix("layers.0."): v for k, v in w.items() if k.startswith("layers.0.")}
    layer.load_state_dict(own)
    module, _ = read_head(folder)
    assert isinstance(module, EagleModule)
    e, taps = torch.randn(1, TOKENS, 64), torch.randn(1, TOKENS, 3 * 64)
    g, positions = module.fc(taps), torch.arange(TOKENS)
    y = layer(
        torch.cat([e, taps @ w["fc.weight"].T], -1),
        attention_mask=torch.full((1, 1, TOKENS, TOKENS), -torch.inf).triu(1),
        position_ids=positions[None],
        position_embeddings=LlamaRotaryEmbedding(sizes)(g, positions[None]),
    )
    theirs = F.rms_norm(y, (64,), w["norm.weight"], sizes.rms_norm_eps) @ w["lm_head.weight"].T
    q, k, v = module.project(e, g, positions)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ours = module.logits(module.finish(g, mixed))
    return float((ours - theirs).abs().max() / theirs.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="The unpacked wheel.")
    packages(parser.parse_args().source)
    for normed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            write_head(a_head(normed), Path(folder, "ours"), {})
            export_speculators(Path(folder, "ours"), Path(folder, "out"), "org/target")
            found = difference(Path(folder, "out"))
        print(f"norm_before_residual {normed}: largest relative difference of logits {found:.1e}")
        if found > 1e-5:
            sys.exit(1)


if __name__ == "__main__":
    main()
