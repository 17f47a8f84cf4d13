"""Kvasir below LMCache: `KvasirClient` for its server (`native_plugin`), `KvasirConnectorAdapter` in the engine's process.

See `docs/engines/lmcache.md`.
"""

from typing import Any

from kvasir.lmcache.client import KvasirClient

__all__ = ["KvasirClient", "KvasirConnectorAdapter"]


def __getattr__(name: str) -> Any:
    # The server's plugin imports neither torch nor LMCache; the connector needs both.
    if name == "KvasirConnectorAdapter":
        from kvasir.lmcache.connector import KvasirConnectorAdapter

        return KvasirConnectorAdapter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
