"""``outrider drafts``: what drafts there are, what a head is, and whether it fits a target."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options as o

_AUTO = "What fits the target: its own head and lookups, or lookups alone; or what tune chose."
_SPELLED = {
    "mixed": "a+b",
    "model": "model:PATH",
    "crosstoken": "crosstoken:PATH",
    "medusa": "medusa:FOLDER",
    "early_exit": "early_exit:K",
    "script": "script:IDS",
}
_USELESS = 1.05
"""Tokens a call below which a draft is not worth its time anywhere."""

app = typer.Typer(no_args_is_help=True, help="List, inspect and check what drafts.")

_SHIPPED = ("eagle", "shipped")
_DEFAULT = "smollm2-135m"

Draft = Annotated[
    str,
    typer.Argument(
        metavar="DRAFT", help="A head's or model's folder; eagle is the head that comes along."
    ),
]

if find_spec("outrider.cli.exits"):
    app.command("exits")(import_module("outrider.cli.exits").exits)


@app.command("list")
def list_drafts(as_json: o.AsJson = False) -> None:
    """Drafts that were fitted to a target on this machine, and drafters by name.

    They are looked for in the package, in the cache folder's drafts, and in the folders that
    OUTRIDER_DRAFTS names.
    """
    from outrider.registry import DRAFTERS

    heads = [_row(origin, folder) for origin, folder in _found()]
    drafters = [{"name": name, "description": _first_line(name)} for name in DRAFTERS]
    if as_json:
        typer.echo(json.dumps({"heads": heads, "drafters": drafters}))
        return
    from rich.table import Table

    from outrider.cli.screen import console

    if heads:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("head", "weights", "size", "from"):
            table.add_column(column)
        table.add_column("folder", overflow="fold")
        for row in heads:
            if "problem" in row:
                shown = ("unreadable", "", "")
            else:
                shown = (
                    row["kind"], f"{row['parameters'] / 1e6:.3g} M",
                    f"{row['file_bytes'] / 1e6:.3g} MB",
                )  # fmt: skip
            table.add_row(*shown, row["origin"], row["folder"])
        # Wide enough for every path: one that is broken cannot be copied.
        widest = max(len(row["folder"]) for row in heads)
        console(width=max(console().width, 60 + widest), soft_wrap=True).print(table)
    else:
        typer.echo("no draft heads here; outrider train makes one")
    console().print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("drafter", ""):
        table.add_column(column)
    table.add_row("auto", _AUTO)
    for row in drafters:
        table.add_row(_SPELLED.get(row["name"], row["name"]), row["description"])
    console().print(table)


@app.command()
def info(draft: Draft, as_json: o.AsJson = False) -> None:
    """What a draft head or model is, which target it was made for, and how it was trained.

    eagle, or shipped, is the head that comes with the default model.
    """
    from outrider.models.drafts import describe

    result = describe(_folder(draft, _DEFAULT)).to_dict()
    if as_json:
        typer.echo(json.dumps(result))
        return
    result |= {
        "target": result["target"] or "it does not say",
        "about": result["about"] or None,
        "file_bytes": f"{result['file_bytes'] / 1e6:.3g} MB",
    }
    _print_pairs(result)


@app.command()
def check(
    draft: Draft,
    target: o.TargetName = _DEFAULT,
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    as_json: o.AsJson = False,
) -> None:
    """Whether a draft was made for a target, part by part, and what it is worth on it.

    Three short probes are decoded greedily. eagle, or shipped, is the head that comes with the
    target. Exit codes: 0 all parts match; 1 some differ, or the draft does not say which target it
    was made for.
    """
    from outrider.cli.screen import Screen, load_engine
    from outrider.engine.matching import DraftMismatchWarning, measure, recorded_target
    from outrider.models.drafts import describe

    folder = _folder(draft, target)
    head = describe(folder)
    made_for = recorded_target(folder, {"target": head.target})
    engine = load_engine(
        Screen(), target, drafter="none", adapter=adapter, adapter_mode=adapter_mode,
        runtime=runtime, dtype=dtype, device=device,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DraftMismatchWarning)
        drafter = engine.make_drafter(f"{head.kind}:{folder}")
    # A head that does not match was measured already.
    measured = [one.message.worth for one in told if isinstance(one.message, DraftMismatchWarning)]
    worth = measured[0] if measured else measure(engine, drafter)
    found = engine.fingerprint()
    theirs = {} if made_for is None else made_for.to_dict()
    ours = {} if found is None else found.to_dict()
    parts = {
        part: {
            "head": theirs.get(part),
            "target": ours.get(part),
            "same": bool(theirs) and theirs.get(part) == ours.get(part),
        }
        for part in ours or theirs
    }
    matches = bool(parts) and all(part["same"] for part in parts.values())
    result: dict[str, Any] = {
        "folder": str(folder),
        "target": target,
        "matches": matches,
        "parts": parts,
        "acceptance_rate": worth and worth.acceptance_rate,
        "tokens_per_target_call": worth and worth.tokens_per_target_call,
    }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_check(result, worth)
    raise typer.Exit(0 if matches else 1)


def _print_check(result: dict[str, Any], worth: Any) -> None:
    from rich.table import Table

    from outrider.cli.screen import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("part", "made for", "here", ""):
        table.add_column(column)
    for name, part in result["parts"].items():
        shown = (
            "unknown" if part[side] is None else part[side] or "none" for side in ("head", "target")
        )
        table.add_row(name.replace("_", " "), *shown, "same" if part["same"] else "differs")
    console().print(table)
    console().print()
    console().print("The draft matches." if result["matches"] else "The draft does not match.")
    console().print(f"On three short probes: {worth or 'not measured'}.")
    if worth and worth.tokens_per_target_call and worth.tokens_per_target_call < _USELESS:
        console().print("That is no better than plain decoding: outrider train can fit it further.")


def _folder(draft: str, target: str) -> Path:
    """The folder that is meant: a name stands for the head that comes with a target."""
    from outrider.errors import ModelNotFoundError
    from outrider.models.heads.folder import shipped_head

    if draft not in _SHIPPED or Path(draft).is_dir():
        return Path(draft)
    found = shipped_head(target)
    if found is None:
        raise ModelNotFoundError(
            f"No draft head comes with '{target}'.",
            hint="Give a head's folder; outrider drafts list shows those that there are.",
        )
    return found


def _print_pairs(values: dict[str, Any]) -> None:
    """Names and values in two columns, what is inside a mapping below its name."""
    from rich.table import Table

    from outrider.cli.screen import console

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(values):
        table.add_row(name, value)
    console().print(table)


def _rows(values: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = "  " * depth + key.replace("_", " ")
        if isinstance(value, dict) and value:
            yield name, ""
            yield from _rows(value, depth + 1)
        elif value is not None:
            yield name, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        parts = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in value)
        return ", ".join(parts) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    plain_int = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if plain_int else str(value) or "none"


def _row(origin: str, folder: Path) -> dict[str, Any]:
    """One head of the list; a broken one must not hide the others."""
    from outrider.errors import ModelError
    from outrider.models.drafts import describe

    row: dict[str, Any] = {"name": folder.name, "origin": origin, "folder": str(folder)}
    try:
        head = describe(folder)
    except ModelError as error:
        return row | {"problem": str(error)}
    return row | {
        "kind": head.kind,
        "parameters": head.parameters,
        "file_bytes": head.file_bytes,
        "target": head.target,
    }


def _found() -> list[tuple[str, Path]]:
    from outrider.models.drafts import find_heads

    return list(find_heads())


def _first_line(drafter: str) -> str:
    from outrider.registry import DRAFTERS

    lines = (DRAFTERS.load(drafter).__doc__ or "").strip().splitlines()
    # One sentence: what follows it is for whoever reads the code.
    return f"{lines[0].split('. ')[0].rstrip('.')}." if lines else ""
