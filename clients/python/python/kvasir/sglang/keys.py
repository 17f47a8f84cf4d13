"""What the keys of SGLang's pages are made of.

SGLang's page hash is a SHA-256 chain over token ids, seeded with the request's extra key and salt. What it does not cover,
the model and how a page lies in memory, is in the namespace.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.version import __version__

from kvasir._connection import release
from kvasir.namespace import SCHEMA, canonical, digest
from kvasir.sglang.pools import Pages
from kvasir.sglang.settings import Settings

logger = logging.getLogger(__name__)

HASH_BYTES = 32


def page_hashes(keys: Iterable[str]) -> bytes:
    """The 32 bytes of each key, joined."""
    return b"".join(map(_page_hash, keys))


def _page_hash(key: str) -> bytes:
    if len(key) == 2 * HASH_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    # Not one of SGLang's page hashes; a hash of another form cannot meet one.
    return hashlib.sha256(b"kvasir sglang key " + key.encode()).digest()


def replicated(name: str, host: Any, config: HiCacheStorageConfig) -> bool:
    """Whether every TP rank holds the same bytes of this pool, so that SGLang lets one rank write them.

    SGLang's own word (`is_mla_model`) is about the target's cache. Mamba's states are split all the same, and so is a draft
    model with ordinary heads: its pages must not be taken from another rank.
    """
    split = name == str(PoolName.MAMBA) or isinstance(host, (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost))
    return config.is_mla_model and not split


def namespace(
    name: str,
    host: Any,
    pages: Pages,
    config: HiCacheStorageConfig,
    settings: Settings,
    model: str,
    facts: Mapping[str, str],
    epoch: str,
) -> bytes:
    """Digest of everything that must be equal for two pages of the same hash to hold the same bytes."""
    dtype = str(getattr(host, "dtype", ""))
    kv_dtype = settings.kv_dtype or facts.get("kv_cache_dtype", "")
    if not kv_dtype and dtype in ("", "torch.uint8", "torch.int8"):
        raise ValueError(
            f'kvasir needs "kv_dtype" in {settings.where}: pool {name} holds bytes, and SGLang does not say what they mean. '
            'Write the cache\'s type, such as "kv_dtype": "fp8_e4m3"'
        )
    changes = {field: value for field, value in facts.items() if field not in ("model_path", "revision")}
    shared = replicated(name, host, config)
    fields = {
        "schema": SCHEMA,
        "engine": "sglang",
        "engine_version": release(__version__),
        "model": model,
        "weights_version": settings.weights_version,
        "adapters_version": settings.adapters_version,
        "settings": changes,
        "hash": "sglang-sha256",
        "pool": name,
        "kind": type(host).__name__,
        "format": getattr(host, "storage_format_tag", None),
        "layout": str(getattr(host, "layout", "")),
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "page_size": pages.page_size,
        "runs": [size for _, size, _ in pages.runs],
        "layers": [int(getattr(host, "start_layer", 0) or 0), int(getattr(host, "end_layer", 0) or 0)],
        "tp": None if shared else [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [config.dcp_rank, config.dcp_size],
        "epoch": epoch,
    }
    made = digest(fields)
    # For `python -m kvasir explain`, which says why two engines do not share.
    logger.info("kvasir namespace %s: %s", made.hex(), canonical(fields).decode())
    return made
