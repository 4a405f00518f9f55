"""``outrider models``: what can be had by name, fetching it, and what a model is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from outrider.cli import options as o

app = typer.Typer(no_args_is_help=True, help="List, fetch and inspect models.")

Name = Annotated[str, typer.Argument(help="A name from the catalogue.")]


@app.command("list")
def list_models(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON array and nothing else.")
    ] = False,
) -> None:
    """The catalogue, and which of it is on this machine."""
    from outrider.models.catalogue import CATALOGUE, is_pulled, path_of

    if as_json:
        rows = [
            {
                "name": e.name,
                "description": e.description,
                "parameters": e.parameters,
                "size_bytes": e.size_bytes,
                "sha256": e.sha256,
                "licence": e.licence,
                "pulled": is_pulled(e),
                "path": str(path_of(e)),
            }
            for e in CATALOGUE.values()
        ]
        typer.echo(json.dumps(rows))
        return
    from rich.table import Table

    from outrider.cli.screen import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "weights", "size", "here", "licence", ""):
        table.add_column(column)
    for e in CATALOGUE.values():
        table.add_row(
            e.name,
            f"{e.parameters / 1e6:.0f} M",
            f"{e.size_bytes / 1e6:.0f} MB",
            "yes" if is_pulled(e) else "no",
            e.licence,
            e.description,
        )
    console().print(table)


@app.command()
def pull(
    name: Name,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check a file that is already here.")
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """Fetch a model, check its SHA-256, and print where it is."""
    path = pull_with_bar(name, verify=verify)
    typer.echo(json.dumps({"name": name, "path": str(path)}) if as_json else str(path))


@app.command()
def remove(name: Name, as_json: o.AsJson = False) -> None:
    """Delete a fetched model from this machine."""
    from outrider.models.catalogue import remove as delete

    there = delete(name)
    if as_json:
        typer.echo(json.dumps({"name": name, "removed": there}))
    else:
        typer.echo(f"{name} was {'removed' if there else 'not here'}")


@app.command()
def info(
    target: Annotated[str, typer.Argument(help="As for --target.")],
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    wanted: o.Runtime = "auto",
    numbers: Annotated[
        bool,
        typer.Option(
            help="Load the model and measure whether a position's numbers are the same in any "
            "block."
        ),
    ] = True,
    as_json: o.AsJson = False,
) -> None:
    """What a model is, what it needs, which runtime takes it, and whether its numbers hold."""
    from outrider.engine.loading import (
        check_adapter_mode,
        draft_device,
        find_target,
        load_model,
        parse_device,
        parse_dtype,
        runtime_for,
    )
    from outrider.models.adapter import adapter_digest
    from outrider.models.locate import is_present
    from outrider.models.memory import INT4, available_bytes, facts

    check_adapter_mode(adapter_mode, wanted)
    kind, where = parse_dtype(dtype), parse_device(device)
    if not is_present(target):
        pull_with_bar(target)
    located = find_target(target, adapter)
    runtime, why = wanted, "asked for"
    if wanted == "auto":
        runtime, why = runtime_for(located, kind, where, adapter_mode)
    result: dict[str, Any] = {
        "target": target,
        "kind": located.kind,
        "path": str(located.path) if located.path else located.repo,
        "runtime": runtime,
        "runtime_reason": why,
    }
    if located.adapter is not None:
        result |= {
            "adapter": str(located.adapter),
            "adapter_digest": adapter_digest(located.adapter),
            "adapter_mode": adapter_mode,
        }
    if found := facts(located):
        import torch

        from outrider.models.hf import default_device, default_dtype
        from outrider.models.native.load import dtype_for

        place = draft_device(where) or default_device()
        if runtime == "native" and place == "cpu":
            kind = dtype_for(located, kind)
        kind = kind or default_dtype(place)
        # Beside weights of 4 and 8 bits, keys and values are kept in 16.
        kept = torch.float16 if kind in (INT4, torch.int8) else kind
        result |= asdict(found)
        result |= {
            "dtype": str(kind).removeprefix("torch."),
            "weights_bytes": found.weights_bytes(kind),
            "cache_bytes_per_token": found.cache_bytes_per_token(kept),
            "available_bytes": available_bytes(),
        }
    if numbers:
        from outrider.models.numerics import check_numbers

        model, _ = load_model(
            located, runtime=runtime, dtype=dtype, device=device, adapter_mode=adapter_mode
        )
        text = [i * 7919 % model.vocab_size for i in range(1, min(97, model.context_length))]
        measured = check_numbers(model, text)
        result |= {
            "rollback": model.rollback,
            "same_numbers_in_any_block": measured.same_bits,
            "same_numbers_in_trees": measured.same_in_trees,
            "largest_logit_difference": measured.largest_difference,
        }
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.table import Table

    from outrider.cli.screen import console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path is of no use with its end cut off
    for key, value in result.items():
        if value is not None:
            table.add_row(key.replace("_", " "), _readable(key, value))
    console().print(table)


def pull_with_bar(name: str, *, verify: bool = False) -> Any:
    """``catalogue.pull`` with a progress bar on standard error."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from outrider.cli.screen import console
    from outrider.models.catalogue import pull as fetch

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(name, total=None)

        def report(doing: str, done: int, total: int) -> None:
            # A download has no end in sight: pip does not say how far it is.
            known = total if doing != "downloading" else None
            bar.update(task, description=f"{doing} {name}", completed=done, total=known)

        return fetch(name, report=report, verify=verify)


def _readable(key: str, value: Any) -> str:
    if key.endswith("_bytes") or key == "cache_bytes_per_token":
        return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
