"""Where the server listens; apart from the rest, so that a mistake is told before all is loaded."""

from __future__ import annotations

import socket

from outrider.errors import UsageError

__all__ = ["address_of", "bind"]


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
