"""Kvasir as vLLM's external KV cache.

`KvasirConnector` moves blocks between vLLM's own cache and a Kvasir host, where that cache lies in host memory.
`KvasirTier` is a tier of vLLM's OffloadingConnector, which does the copies to and from a GPU itself.

vLLM is imported on first use of a class, so that `import kvasir.vllm` works where it is not installed.
"""

from __future__ import annotations

import contextlib
from typing import Any

_HOME = {"KvasirConnector": "kvasir.vllm.connector", "KvasirTier": "kvasir.vllm.tier"}

__all__ = ["KvasirConnector", "KvasirTier", "register"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def register() -> None:
    """Makes the short names known to vLLM; an entry point of the group `vllm.general_plugins`.

    vLLM calls it in each of its processes and sometimes twice in one, which its registries refuse with a ValueError.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    for add, name in (
        (KVConnectorFactory.register_connector, "KvasirConnector"),
        (SecondaryTierFactory.register_tier, "KvasirTier"),
    ):
        with contextlib.suppress(ValueError):
            add(name, _HOME[name], name)
