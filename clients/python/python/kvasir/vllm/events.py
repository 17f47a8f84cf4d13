"""vLLM's KV cache events for what is at the host: blocks that this engine has stored there, and those of them that have left.

A block is announced when its save has ended and the host, asked after that, has it in a tier of its own under every worker's
namespace, whoever has stored it. It is withdrawn, once, when the host says that one of these has left, and whenever that can
no longer be known. So a reader may miss a block that is there, and remembers none for longer than it takes to ask.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvasir import Unavailable
from kvasir.vllm.messages import HASH_BYTES, Job

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvasir._core import Core
    from kvasir.vllm.geometry import Frame, Group

logger = init_logger("vllm.kvasir.events")

MEDIUM_KVASIR = "KVASIR"
"""Where these events' blocks are, beside vLLM's "GPU", "CPU" and "STORAGE"."""

ANNOUNCED_MAX = 262_144
"""Blocks that are followed. The one that was announced first is withdrawn for one more, though the host may have it."""

ENDED_MAX = 65_536
"""Blocks that wait for a host that does not answer. Beyond them the oldest saves are never announced."""

ASK_MAX = 4096
"""Blocks of one question, unless one save has more."""

OWN_TIERS = b"\1\2\3"
"""What `Core.tiers` says of blocks whose leaving the host tells. What another host lets go, it does not."""

STORED_SECONDS = 0.1
"""How often the host is asked whether it has what was saved, while other saves are under way."""

REMOVALS_SECONDS = 0.5
"""How often the host is asked what has left it; and for how long nothing is asked after it has not answered."""

PAGES_MAX = 16
"""Pages of what has left that are read in one step."""


class _Block(NamedTuple):
    """What a reader is told of a block, kept from the start of its save, as the request may end before it."""

    hash: bytes
    parent: bytes | None
    tokens: list[int]
    extra: tuple[Any, ...] | None


class _Save(NamedTuple):
    """Blocks of one request in one group."""

    group: int
    """Position in the connector's list of groups."""
    lora_id: int | None
    lora_name: str | None
    blocks: list[_Block]


_Id = tuple[int, bytes]
"""A block that was announced: position of its group, and hash."""


class Events:
    """What this engine has announced. Nothing here raises, and everything is bounded."""

    def __init__(self, kv: KVCacheConfig, frame: Frame, core: Core) -> None:
        self.core = core
        self._groups = frame.groups
        self._specs = [kv.kv_cache_groups[group.index].kv_cache_spec for group in frame.groups]
        self._saving: dict[int, _Save] = {}
        self._ended: deque[_Save] = deque()
        self._ended_blocks = 0
        self._announced: dict[_Id, tuple[bytes, ...]] = {}
        """The keys that the host has a block under, one for each namespace; the block that was announced first comes first."""
        self._of_key: dict[bytes, _Id] = {}
        self._queue: list[KVCacheEvent] = []
        self._boot = 0
        self._position = 0
        """Up to where the host's removals were read; 0 before the first answer, which no position is."""
        self._removals_at = 0.0
        self._stored_at = 0.0
        self._again_at = 0.0

    @classmethod
    def of(cls, config: VllmConfig, kv: KVCacheConfig, frame: Frame, core: Core) -> Events | None:
        """None means that vLLM publishes no events."""
        asked = config.kv_events_config
        return cls(kv, frame, core) if asked is not None and asked.enable_kv_cache_events else None

    # From the scheduler's half

    def begin(self, job: Job, request: Request, start: int) -> None:
        """A save begins; its blocks are among those of the request from token `start` on."""
        try:
            lora = request.lora_request
            blocks = list(_described(job, request, self._groups[job.group], start))
            self._saving[job.number] = _Save(
                job.group, lora.adapter_id if lora else None, lora.name if lora else None, blocks
            )
        except Exception as error:
            logger.warning_once("kvasir: blocks are saved and not announced: %s", str(error))

    def end(self, number: int) -> None:
        """A save has ended on all workers, well or not."""
        if (save := self._saving.pop(number, None)) is None:
            return
        self._ended.append(save)
        self._ended_blocks += len(save.blocks)
        while self._ended_blocks > ENDED_MAX:
            self._ended_blocks -= len(self._ended.popleft().blocks)

    def reset(self) -> None:
        """From now on other keys are used, and nothing from before is found again."""
        self._saving.clear()
        self._ended.clear()
        self._ended_blocks = 0
        self._withdraw(list(self._announced))

    def take(self, namespaces: Sequence[Sequence[bytes]]) -> list[KVCacheEvent]:
        """The events since the last call. `namespaces` are those of each group now."""
        try:
            self._look(namespaces)
        except Unavailable:
            # A question that was not answered is asked again.
            self._again_at = time.monotonic() + REMOVALS_SECONDS
        except Exception as error:
            logger.warning_once("kvasir: what is at the host is not announced: %s", str(error))
        events, self._queue = self._queue, []
        return events

    # What the host says

    def _look(self, namespaces: Sequence[Sequence[bytes]]) -> None:
        self._restarted()
        now = time.monotonic()
        if now < self._again_at or not (self._announced or self._ended):
            return
        if now >= self._removals_at or not self._position:
            self._removals_at = now + REMOVALS_SECONDS
            self._follow()
        # The last save is asked for at once, as an engine without work takes no more steps.
        if self._ended and (now >= self._stored_at or not self._saving):
            self._stored_at = now + STORED_SECONDS
            self._ask(namespaces)

    def _restarted(self) -> bool:
        """Whether the host is another one than at the last look. Of what it had, nothing is known."""
        if (boot := self.core.boot()) == self._boot:
            return False
        self._boot, self._position, self._removals_at = boot, 0, 0.0
        self._withdraw(list(self._announced))
        return True

    def _follow(self) -> None:
        """Withdraws what has left the host since the last time."""
        if not self._announced:
            # What has left meanwhile does not matter here.
            self._position = 0
        try:
            for _ in range(PAGES_MAX):
                after, lost, keys = self.core.removals(self._position)
                self._withdraw(list(self._announced) if lost else self._known(keys))
                if after == self._position:
                    return
                self._position = after
            self._removals_at = 0.0
        except Unavailable:
            # Either the host is away, and the next question fails as well and at once; or it is of a release that does not
            # tell, which the client knows without asking. Then blocks are announced nevertheless, and withdrawn when it is
            # another host.
            pass

    def _known(self, keys: Iterable[bytes]) -> list[_Id]:
        """The blocks of these keys, each once."""
        return list(dict.fromkeys(self._of_key[key] for key in keys if key in self._of_key))

    def _ask(self, namespaces: Sequence[Sequence[bytes]]) -> None:
        """Announces what the host has of the saves that have ended.

        By now it is known where reading its removals must begin: what leaves after its answer comes after that.
        """
        while self._ended:
            saves = self._some()
            group = saves[0].group
            hashes = b"".join(block.hash for save in saves for block in save.blocks)
            tiers = [self.core.tiers(space, hashes, HASH_BYTES) for space in namespaces[group]]
            if self._restarted():
                # The answers may be of two hosts.
                return
            keys = [self.core.keys(space, hashes, HASH_BYTES) for space in namespaces[group]]
            here = [all(tier in OWN_TIERS for tier in one) for one in zip(*tiers, strict=True)]
            found = [one if there else None for one, there in zip(zip(*keys, strict=True), here, strict=True)]
            for save in saves:
                self._ended.popleft()
                self._ended_blocks -= len(save.blocks)
                self._store(save, found[: len(save.blocks)])
                del found[: len(save.blocks)]
            if (over := len(self._announced) - ANNOUNCED_MAX) > 0:
                self._withdraw(list(islice(self._announced, over)))

    def _some(self) -> list[_Save]:
        """The next saves, all of one group."""
        some: list[_Save] = []
        blocks = 0
        for save in self._ended:
            blocks += len(save.blocks)
            if some and (blocks > ASK_MAX or save.group != some[0].group):
                break
            some.append(save)
        return some

    # What readers are told

    def _store(self, save: _Save, keys: list[tuple[bytes, ...] | None]) -> None:
        """Announces those blocks that have keys. An event is a run of blocks, each of which is the next one's parent."""
        run: list[_Block] = []
        for block, here in zip(save.blocks, keys, strict=True):
            if run and block.parent != run[-1].hash:
                self._queue.append(self._stored(save, run))
                run = []
            known = (save.group, block.hash)
            # Announced once, as readers may count.
            if here is not None and known not in self._announced:
                self._announced[known] = here
                self._of_key.update((key, known) for key in here)
                run.append(block)
        if run:
            self._queue.append(self._stored(save, run))

    def _stored(self, save: _Save, run: list[_Block]) -> BlockStored:
        group, spec, parent = self._groups[save.group], self._specs[save.group], run[0].parent
        return BlockStored(
            block_hashes=[_external(block.hash) for block in run],
            parent_block_hash=None if parent is None else _external(parent),
            token_ids=[token for block in run for token in block.tokens],
            block_size=group.block_tokens,
            lora_id=save.lora_id,
            medium=MEDIUM_KVASIR,
            lora_name=save.lora_name,
            extra_keys=to_event_extra_keys([block.extra for block in run]),
            group_idx=group.index,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        )

    def _withdraw(self, blocks: list[_Id]) -> None:
        by_group: dict[int, list[bytes]] = {}
        for known in blocks:
            for key in self._announced.pop(known):
                self._of_key.pop(key, None)
            by_group.setdefault(known[0], []).append(known[1])
        for group, hashes in by_group.items():
            removed = [_external(one) for one in hashes]
            self._queue.append(BlockRemoved(removed, medium=MEDIUM_KVASIR, group_idx=self._groups[group].index))


def _described(job: Job, request: Request, group: Group, start: int) -> Iterable[_Block]:
    """A job's blocks, which are all of the request's from `start` on but those that a sliding window has left behind."""
    hashes, each, tokens = request.block_hashes, group.hashes_per_block, group.block_tokens
    place = start // tokens
    for offset in range(0, len(job.hashes), HASH_BYTES):
        wanted = job.hashes[offset : offset + HASH_BYTES]
        while hashes[(place + 1) * each - 1] != wanted:
            place += 1
        first, last = place * tokens, (place + 1) * tokens
        extra, _ = generate_block_hash_extra_keys(request, first, last, 0)
        parent = bytes(hashes[place * each - 1]) if place else None
        yield _Block(wanted, parent, list(request.all_token_ids[first:last]), extra)
        place += 1


def _external(hash_: bytes) -> Any:
    return maybe_convert_block_hash(BlockHash(hash_))
