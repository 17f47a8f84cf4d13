"""Where the pages of one of SGLang's host pools lie in memory.

A pool says addresses and sizes for any indices (`get_page_buffer_meta`), which costs Python for each page. Here three pages
are asked for once, and the rest follows if the pool is regular: every piece of page `p` lies at `start + p * stride`. A pool
that is not, or whose pages move, is refused by name, as a guess would read or write somebody else's memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Meta = list[tuple[int, int]]


@dataclass(frozen=True)
class Pages:
    """The pages of one pool."""

    runs: tuple[tuple[int, int, int], ...]
    """(address, bytes, stride) of each contiguous piece of a page: K and V, or one, or two a layer."""
    count: int
    page_size: int
    """Indices (tokens, or states) a page."""
    owner: tuple[torch.Tensor, ...]
    """What keeps the memory alive."""

    def packed(self) -> bytes:
        """The runs as the core takes them: u64, little endian."""
        return b"".join(struct.pack("<QQQ", *run) for run in self.runs)

    def numbers(self, indices: torch.Tensor | None, pages: int) -> bytes | None:
        """Page numbers (u32, little endian) of `pages` whole pages, or None if `indices` does not name that many."""
        if indices is None or indices.numel() != pages * self.page_size:
            return None
        rows = indices.detach().cpu().numpy().reshape(pages, self.page_size)
        first = rows[:, :1]
        whole = (rows == first + np.arange(self.page_size)).all() and (first % self.page_size == 0).all()
        number = first[:, 0] // self.page_size
        if not whole or (number < 0).any() or (number >= self.count).any():
            return None
        return number.astype("<u4").tobytes()


def pages_of(pool: Any) -> Pages:
    """Where the pages of `pool` lie; ValueError that names the pool and why it cannot be used."""
    name = f"{type(pool).__name__} in layout {getattr(pool, 'layout', '?')}"
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise ValueError(f"kvasir cannot store {name}: its pages move between pools")
    if getattr(pool, "logical_size", pool.size) != pool.size:
        raise ValueError(f"kvasir cannot store {name}: its indices are spread over several ranks")
    page_size = pool.page_size or 1
    count = pool.size // page_size
    if count < 1:
        raise ValueError(f"kvasir cannot store {name}: it has no pages")
    first, second, last = (_meta(pool, name, page, page_size) for page in (0, min(1, count - 1), count - 1))
    if not first or not len(first) == len(second) == len(last):
        raise ValueError(f"kvasir cannot store {name}: its pages are not made of the same pieces")
    owner = tuple(_tensors(pool))
    runs = []
    for (start, size), (next_start, next_size), (end, end_size) in zip(first, second, last):
        stride = next_start - start if count > 1 else size
        if not size == next_size == end_size or stride < size or end != start + (count - 1) * stride:
            raise ValueError(f"kvasir cannot store {name}: its pages do not lie at equal distances")
        if not any(_holds(tensor, start, end + size) for tensor in owner):
            raise ValueError(f"kvasir cannot store {name}: it does not hold the memory that it names")
        runs.append((start, size, stride))
    return Pages(tuple(runs), count, page_size, owner)


def _meta(pool: Any, name: str, page: int, page_size: int) -> Meta:
    indices = torch.arange(page * page_size, (page + 1) * page_size, dtype=torch.int64)
    try:
        starts, sizes = pool.get_page_buffer_meta(indices)
    except (AttributeError, NotImplementedError, ValueError, TypeError) as failure:
        # Such as DeepSeek V4's logical anchor, which owns no bytes.
        raise ValueError(f"kvasir cannot store {name}: it gives no addresses ({failure})") from failure
    return list(zip(starts, sizes))


def _tensors(pool: Any) -> Iterator[torch.Tensor]:
    seen = set()
    for value in vars(pool).values():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage().data_ptr()
                if storage not in seen:
                    seen.add(storage)
                    yield tensor


def _holds(tensor: torch.Tensor, start: int, end: int) -> bool:
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= start and end <= storage.data_ptr() + storage.nbytes()
