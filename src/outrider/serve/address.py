"""Where the server listens; apart from the rest, so that a mistake is told before all is loaded."""

from __future__ import annotations

import socket
from collections.abc import Collection
from ipaddress import ip_address

from outrider.errors import UsageError

__all__ = ["address_of", "bind", "host_of", "hosts_for", "is_loopback"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bind(host: str, port: int) -> socket.socket:
    """Take a port before a model is loaded for minutes; 0 takes any that is free.

    Raises
    ------
    UsageError
        When it cannot be had.
    """
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        raise UsageError(
            f"Port {port} of '{host}' cannot be had: {getattr(error, 'strerror', None) or error}.",
            hint="Choose another --port (0 takes a free one), or another --host.",
        ) from error
    return taken


def address_of(taken: socket.socket) -> str:
    """As a client writes it.

    Example
    -------
    >>> address_of(bind("127.0.0.1", 0)).startswith("http://127.0.0.1:")
    True
    """
    host, port, *_ = taken.getsockname()
    return f"http://[{host}]:{port}" if taken.family == socket.AF_INET6 else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's alone.

    Example
    -------
    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "a.example")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_for(host: str, allowed: Collection[str] = ()) -> tuple[str, ...] | None:
    """Names under which a server that listens at ``host`` may be spoken to; ``None``: any.

    Where others can reach it, any name may be its own unless some are given; at a loopback address
    no web page but one of this machine has business here.

    Raises
    ------
    UsageError
        When a name has a port or a path.

    Example
    -------
    >>> hosts_for("127.0.0.1", ["Llm.example"])
    ('localhost', '127.0.0.1', '::1', 'llm.example')
    >>> hosts_for("0.0.0.0") is None
    True
    """
    for name in allowed:
        if not name or host_of(name) != name.lower().strip("[]"):
            raise UsageError(
                f"'{name}' is no name of a host.",
                hint="Example: --allow-host llm.example.org, without a port.",
            )
    if not allowed and not is_loopback(host):
        return None
    own = (host,) if is_loopback(host) else ()
    names = (*_LOOPBACK, *own, *(host_of(name) for name in allowed))
    return tuple(dict.fromkeys(names))


def host_of(header: str) -> str:
    """The name in a ``Host`` header, without a port.

    Example
    -------
    >>> [host_of(text) for text in ("LocalHost:8000", "[::1]:80", "a.example.", "")]
    ['localhost', '::1', 'a.example', '']
    """
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")
