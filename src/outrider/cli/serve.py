"""``outrider serve``: an OpenAI-style server."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options as o
from outrider.errors import UsageError
from outrider.lab.configuration import parse_length

app = typer.Typer()

_SERVER = "Server"
_LIMITS = "Limits"
_NEEDED = ("fastapi", "prometheus_client", "uvicorn")
_CACHE_SHARE = 0.8
"""Of the memory that is free once the models are loaded."""


@app.command()
def serve(
    *,
    target: o.TargetName = "smollm2-135m",
    adapter: o.Adapter = None,
    adapter_mode: o.AdapterMode = "merged",
    drafter: o.DrafterName = "auto",
    strict: o.Strict = False,
    rule: o.RuleName = "auto",
    draft_length: o.DraftLength = "auto",
    runtime: o.Runtime = "auto",
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER
        ),
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="OUTRIDER_API_KEY",
            help="Clients must send it as a bearer token. The environment hides it better.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="What clients call the model (the target's).", rich_help_panel=_SERVER
        ),
    ] = None,
    max_batch: Annotated[
        int,
        typer.Option("--max-batch", min=1, help="Outputs side by side.", rich_help_panel=_LIMITS),
    ] = 8,
    queue: Annotated[
        int, typer.Option("--queue", min=0, help="Requests that may wait.", rich_help_panel=_LIMITS)
    ] = 64,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", "-n", min=1, help="Of one output.", rich_help_panel=_LIMITS),
    ] = 4096,
    max_body: Annotated[
        int,
        typer.Option("--max-body", min=1, help="Bytes of a request.", rich_help_panel=_LIMITS),
    ] = 1_000_000,
    cache_gb: Annotated[
        float | None,
        typer.Option(
            "--cache-gb",
            min=0.0,
            help="Memory for all caches (four fifths of what is free).",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            min=0.0,
            help="Seconds that requests have to finish when the server is stopped.",
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
    as_json: o.AsJson = False,
) -> None:
    """Serve /v1/chat/completions and /v1/completions to OpenAI's clients.

    The address is told on standard output when requests are taken; the log, one JSON object a
    line, goes to standard error. SIGTERM and Ctrl-C let running requests finish.
    """
    from outrider.serve.address import address_of, bind

    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UsageError(
            f"A server needs {', '.join(missing)}, not installed here.",
            hint="pip install 'outrider[serve]'",
        )
    if api_key is not None and not api_key.strip():
        raise UsageError("The API key is empty.", hint="Give one, or leave --api-key out.")
    with bind(host, port) as taken:
        from outrider.cli.screen import Screen, load_engine
        from outrider.models.memory import free_bytes
        from outrider.serve.app import Service
        from outrider.serve.limits import Limits
        from outrider.serve.logs import log, to_stderr
        from outrider.serve.server import run

        screen = Screen()
        engine = load_engine(
            screen,
            target,
            drafter=drafter,
            rule=rule,
            draft_length=parse_length(draft_length),
            runtime=runtime,
            dtype=dtype,
            device=device,
            adapter=adapter,
            adapter_mode=adapter_mode,
            strict=strict,
        )
        free = free_bytes(getattr(engine.model, "device", "cpu"))
        model_name = name or (Path(target).name if Path(target).exists() else target)
        service = Service(
            engine,
            model_name,
            drafter=drafter,
            limits=Limits(max_tokens=max_tokens, body_bytes=max_body),
            max_batch=max_batch,
            queue=queue,
            cache_bytes=int(_CACHE_SHARE * free if cache_gb is None else cache_gb * 1e9),
            api_key=api_key,
        )
        address = address_of(taken)
        to_stderr()

        def ready() -> None:
            told = {"address": address, "model": model_name}
            log("ready", address=address, model=model_name)
            if api_key is None and host not in ("127.0.0.1", "::1", "localhost"):
                log("open_to_all", level=30, hint="Others can reach this address; see --api-key.")
            print(
                json.dumps(told) if as_json else f"Serving {model_name} at {address}/v1", flush=True
            )

        if not run(service, taken, drain_s=drain, ready=ready):
            raise typer.Exit(1)
