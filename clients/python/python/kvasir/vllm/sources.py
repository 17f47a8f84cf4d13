"""From which tier of the host the tokens of a hit come, for vLLM's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvasir.vllm.messages import HASH_BYTES

if TYPE_CHECKING:
    from kvasir._core import Core

UNKNOWN = CacheHitSource.EXTERNAL_UNSPECIFIED

BY_TIER = {
    1: CacheHitSource.HOST,
    # A GPU of the host, which vLLM does not know of: it comes over the same memory.
    2: CacheHitSource.HOST,
    3: CacheHitSource.DISK,
}
"""By what ``Core.tiers`` says. Another host's pool and a shared store are one answer there, so neither is named here."""


def sources(
    core: Core, namespace: bytes, hashes: Sequence[bytes], block_tokens: int, tokens: int
) -> dict[CacheHitSource, int]:
    """Splits ``tokens`` of a hit, which begins with these blocks. One question to the host; what it does not say is unknown."""
    counts: Counter[CacheHitSource] = Counter()
    left = tokens
    try:
        tiers = core.tiers(namespace, b"".join(hashes), HASH_BYTES) if hashes else b""
    except Exception:
        # A metric is not worth a word in the log; whatever is wrong is met by the load.
        tiers = b""
    for tier in tiers:
        count = min(block_tokens, left)
        counts[BY_TIER.get(tier, UNKNOWN)] += count
        left -= count
    counts[UNKNOWN] += left
    return {source: count for source, count in counts.items() if count}
