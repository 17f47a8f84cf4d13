"""Which prefixes of a hybrid model can be restored, when each of its pools has its own rule."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer


def leading(there: list[bool]) -> int:
    """Length of the leading run of True."""
    return there.index(False) if False in there else len(there)


def fold(pages: int, pools: list[tuple[PoolTransfer, list[bool]]], hits: dict[Any, int]) -> list[int]:
    """The lengths, ascending, at which a prefix of at most `pages` pages can end for every pool.

    Adds each pool's own longest length to `hits`. A pool with trailing pages needs only the last of them, so that 5 can be
    possible while 3 and 4 are not: SGLang intersects these lists over its ranks.
    """
    possible = set(range(1, pages + 1))
    for transfer, there in pools:
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            ends = set(range(1, leading(there) + 1))
        else:
            ends = set(_ends(there, max(1, len(transfer.keys or []))))
        if ends:
            hits[transfer.name] = max(ends)
        possible &= ends
    return sorted(possible)


def _ends(there: list[bool], trailing: int) -> list[int]:
    ends, run = [], 0
    for length, here in enumerate(there, start=1):
        run = run + 1 if here else 0
        if run >= min(trailing, length):
            ends.append(length)
    return ends
