"""KV cache shared between inference engines: client of a Kvasir host, and connectors to engines.

``Client`` is for people and scripts. Engines use their connector: ``kvasir.vllm``, ``kvasir.sglang``, ``kvasir.lmcache``, which
are imported only there. ``kvasir._core.Core`` is what all of them stand on.
"""

from importlib.metadata import PackageNotFoundError, version

from kvasir._core import Error, Mismatch, Refused, Unavailable
from kvasir.client import Client, namespace_digest

try:
    __version__ = version("kvasir")
except PackageNotFoundError:  # Used from a folder, without having been installed.
    __version__ = "0"

__all__ = [
    "Client",
    "Error",
    "Mismatch",
    "Refused",
    "Unavailable",
    "__version__",
    "namespace_digest",
]
