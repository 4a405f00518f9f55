"""``outrider serve``: an OpenAI-style server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options as o
from outrider.errors import UsageError
from outrider.lab.configuration import parse_length

if TYPE_CHECKING:
    from outrider.serve.tracing import Tracing

app = typer.Typer()

_SERVER = "Server"
_LIMITS = "Limits"
_RAY = "Cluster"
_NEEDED = ("fastapi", "prometheus_client", "uvicorn")
_TRACES_ARE_WANTED = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
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
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="A name that requests may be addressed to, beside this machine's own; again for "
            "more. For a server behind a proxy.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(
            "--otlp",
            metavar="URL",
            help="Send traces to this OpenTelemetry collector, by HTTP. The OTEL_* variables are "
            "heeded too.",
            rich_help_panel=_SERVER,
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
    ray: o.OnRay = False,
    ray_address: o.RayAddress = "auto",
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=1, help="Engines on the cluster (1).", rich_help_panel=_RAY),
    ] = None,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            "--min-replicas",
            min=1,
            help="Fewest, where their number follows the requests.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option("--max-replicas", min=1, help="Most.", rich_help_panel=_RAY),
    ] = None,
    as_json: o.AsJson = False,
) -> None:
    """Serve /v1/chat/completions and /v1/completions to OpenAI's clients.

    The address is told on standard output when requests are taken; the log, one JSON object a
    line, goes to standard error. SIGTERM and Ctrl-C let running requests finish.
    """
    from outrider.models.torchrun import follows
    from outrider.serve.address import address_of, bind, hosts_for, is_loopback

    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UsageError(
            f"A server needs {', '.join(missing)}, not installed here.",
            hint="pip install 'outrider[serve]'",
        )
    if api_key is not None and not api_key.strip():
        raise UsageError("The API key is empty.", hint="Give one, or leave --api-key out.")
    hosts = hosts_for(host, allow_host or ())
    scale = _scale(ray, replicas, min_replicas, max_replicas)
    model_name = name or (Path(target).name if Path(target).exists() else target)
    load: dict[str, Any] = {
        "drafter": drafter, "rule": rule, "draft_length": parse_length(draft_length),
        "runtime": runtime, "dtype": dtype, "device": device, "adapter": adapter,
        "adapter_mode": adapter_mode, "strict": strict,
    }  # fmt: skip
    cache_bytes = None if cache_gb is None else int(cache_gb * 1e9)

    def tell(address: str) -> None:
        from outrider.serve.logs import log

        log("ready", address=address, model=model_name)
        if api_key is None and not is_loopback(host):
            log("open_to_all", level=30, hint="Others can reach this address; see --api-key.")
        told = {"address": address, "model": model_name}
        print(json.dumps(told) if as_json else f"Serving {model_name} at {address}/v1", flush=True)

    if scale is not None:
        if otlp:
            raise UsageError("--otlp is for one process; got --ray too.", hint="Leave one out.")
        from outrider.serve.limits import Limits

        _on_ray(
            target, load, scale, ray_address, host, port, tell, model_name=model_name,
            limits=Limits(max_tokens=max_tokens, body_bytes=max_body), max_batch=max_batch,
            queue=queue, cache_bytes=cache_bytes, drain=drain, api_key=api_key, hosts=hosts,
        )  # fmt: skip
        return
    # Of several processes that carry a target together, the first one listens.
    with bind(host, 0 if follows(device) else port) as taken:
        tracing = _tracing(otlp, taken)
        from outrider.cli.screen import Screen, load_engine
        from outrider.models.memory import free_bytes
        from outrider.serve.app import Service
        from outrider.serve.limits import Limits
        from outrider.serve.logs import to_stderr
        from outrider.serve.server import run

        screen = Screen()
        engine = load_engine(screen, target, **load)
        free = free_bytes(getattr(engine.model, "device", "cpu"))
        service = Service(
            engine,
            model_name,
            drafter=drafter,
            limits=Limits(max_tokens=max_tokens, body_bytes=max_body),
            max_batch=max_batch,
            queue=queue,
            cache_bytes=int(_CACHE_SHARE * free) if cache_bytes is None else cache_bytes,
            api_key=api_key,
            hosts=hosts,
            tracing=tracing,
        )
        to_stderr()
        address = address_of(taken)
        if not run(service, taken, drain_s=drain, ready=lambda: tell(address)):
            raise typer.Exit(1)


def _scale(
    ray: bool, count: int | None, least: int | None, most: int | None
) -> tuple[int, int] | None:
    """The fewest and the most replicas there are to be; ``None`` without a cluster."""
    if not ray:
        if any(number is not None for number in (count, least, most)):
            raise UsageError("Replicas run on a cluster.", hint="Add --ray.")
        return None
    if count is not None and (least is not None or most is not None):
        raise UsageError(
            "--replicas is a fixed number; got --min-replicas or --max-replicas too.",
            hint="Leave one out.",
        )
    low = count or least or 1
    high = count or most or low
    if low > high:
        raise UsageError(f"--min-replicas {low} is more than --max-replicas {high}.")
    if find_spec("ray") is None:
        raise UsageError(
            "--ray needs ray, which is not installed here.", hint="pip install 'outrider[ray]'"
        )
    return low, high


def _on_ray(
    target: str,
    load: dict[str, Any],
    scale: tuple[int, int],
    cluster: str,
    host: str,
    port: int,
    tell: Callable[[str], None],
    *,
    drain: float,
    api_key: str | None,
    hosts: tuple[str, ...] | None,
    **service: Any,
) -> None:
    """Deploy on a cluster, whose proxies listen in place of this process."""
    from outrider.engine.cluster import Share
    from outrider.engine.engine import check_load
    from outrider.serve.address import address_of, bind
    from outrider.serve.logs import to_stderr
    from outrider.serve.ray_app import Plan, Scale
    from outrider.serve.ray_server import run

    names = ("drafter", "rule", "draft_length", "runtime", "dtype", "device", "adapter_mode")
    check_load(**{name: load[name] for name in names})
    with bind(host, port) as taken:
        address, port = address_of(taken), taken.getsockname()[1]
    to_stderr()
    run(
        Plan(target, load, drafter=load["drafter"], share=Share(1), **service),
        Scale(*scale),
        cluster=cluster,
        host=host,
        port=port,
        drain_s=drain,
        ready=lambda: tell(address),
        api_key=api_key,
        hosts=hosts,
    )


def _tracing(otlp: str | None, taken: socket) -> Tracing | None:
    """Where the spans of requests go, if they are wanted here or by OpenTelemetry's variables."""
    if not otlp and not any(os.environ.get(name) for name in _TRACES_ARE_WANTED):
        return None
    told = (os.environ.get(name, "") for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"))
    if {"true", "none"} & {value.strip().lower() for value in told}:
        return None
    try:
        from outrider.serve.tracing import to_collector
    except ImportError as error:
        raise UsageError(
            f"Traces need OpenTelemetry's exporter: {error}.",
            hint="pip install 'outrider[tracing]', or unset OTEL_EXPORTER_OTLP_ENDPOINT.",
        ) from error
    host, port, *_ = taken.getsockname()
    return to_collector(otlp, host, port)
