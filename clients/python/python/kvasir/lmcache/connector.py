"""The connector inside the engine's process: LMCache's `remote_storage_plugins`.

It stores full chunks as they lie in LMCache's memory, without the header that LMCache's own stores put before them: shape
and type are the same for all full chunks, and are part of the namespace. A chunk that is not full is not stored.

LMCache may cancel any of these calls. Memory that is being copied is held by a reference of its own until the copy ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlparse

from lmcache.utils import CacheEngineKey
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvasir import Error
from kvasir._jobs import Done, Jobs
from kvasir.lmcache.settings import ProcessSettings

logger = logging.getLogger(__name__)

KEY_BYTES = 32
OF_LMCACHE = ("module_path", "class_name", "url")

# The class below has a method `list`, as LMCache asks, so that it cannot name the type in its annotations.
Memories = list[MemoryObj]
Loaded = list[MemoryObj | None]
Digests = list[bytes]
Buffers = list[Any]
Keys = list[str]


class KvasirConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes `KvasirConnector`s for `kvasir://…` and for the plugins `kvasir` and `kvasir.NAME`."""

    def __init__(self) -> None:
        super().__init__("kvasir://")

    def can_parse(self, url: str) -> bool:
        """Whether `url` is this connector's."""
        plugin = url.removeprefix("plugin://")
        return url.startswith(self.schema) or (plugin != url and extract_plugin_type(plugin) == "kvasir")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """A connector for one engine process. What is wrong in the configuration ends the start of LMCache."""
        try:
            return KvasirConnector(context, settings_of(context))
        except ValueError as wrong:
            # LMCache logs any other exception, goes on without a store, and tries again every ten seconds.
            raise IrrecoverableException(str(wrong)) from wrong


def settings_of(context: ConnectorContext) -> ProcessSettings:
    """Settings from `extra_config` (`remote_storage_plugin.NAME.SETTING`) and the URL."""
    prefix = f"remote_storage_plugin.{context.plugin_name or 'kvasir'}."
    extra = (context.config.extra_config if context.config else None) or {}
    given = {name.removeprefix(prefix): value for name, value in extra.items() if name.startswith(prefix)}
    url = given.get("url") or (context.url if context.url.startswith("kvasir://") else None)
    if url:
        given["host"] = host_of(url)
    return ProcessSettings.parse({name: value for name, value in given.items() if name not in OF_LMCACHE})


def host_of(url: str) -> str:
    """The host's endpoint: `kvasir:///run/kvasir.sock` is a Unix socket, `kvasir://host:port` is TCP; others stay."""
    if not url.startswith("kvasir://"):
        return url
    parsed = urlparse(url)
    return f"tcp://{parsed.netloc}" if parsed.netloc else f"unix:{parsed.path}"


class KvasirConnector(RemoteConnector):  # type: ignore[misc]
    """LMCache's remote store on a Kvasir host."""

    def __init__(self, context: ConnectorContext, settings: ProcessSettings) -> None:
        if context.config is None or context.metadata is None:
            raise ValueError("kvasir needs LMCache's configuration and metadata")
        config, metadata = context.config, context.metadata
        if config.remote_serde not in (None, "naive"):
            raise ValueError(f'kvasir stores chunks as they are: set remote_serde to "naive", it is {config.remote_serde!r}')
        if config.use_layerwise:
            raise ValueError("kvasir stores chunks of all layers: set use_layerwise to false")
        settings.check_hash(config.pre_caching_hash_algorithm)
        super().__init__(config, metadata)
        self.settings = settings
        self._memory = context.local_cpu_backend
        self._namespace = settings.namespace(
            mode="process",
            shapes=[list(shape) for shape in self.meta_shapes],
            dtypes=[str(dtype) for dtype in self.meta_dtypes],
            format=str(self.meta_fmt),
            chunk_size=metadata.chunk_size,
            hash=config.pre_caching_hash_algorithm,
        )
        self._core = settings.core()
        self._jobs = Jobs(self._core)

    # Questions. The core answers within match_ms, so they are asked where they come up.

    async def exists(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is there."""
        return self.batched_contains([key]) == 1

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Whether the chunk is there."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """How many of the leading chunks are there."""
        try:
            return self._core.prefix([self._namespace], b"".join(map(_digest, keys)), KEY_BYTES)
        except Error:
            return 0

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        """`batched_contains`."""
        return self.batched_contains(keys)

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Removes a chunk. Returns whether it was there."""
        try:
            return any(self._core.remove(self._namespace, [_digest(key)]))
        except Error:
            return False

    async def list(self) -> Keys:
        """Refused: the host knows digests of keys, not their text."""
        raise NotImplementedError("kvasir stores digests of LMCache's keys and cannot list them")

    # Loads and saves.

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Loads one chunk into new memory. Returns None if it is not there or not whole."""
        return (await self.batched_get([key]))[0]

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> Loaded:
        """Loads chunks into new memory, and None for each that is not there or not whole."""
        room = self._allocate(len(keys))
        result: Loaded = [None] * len(keys)
        if not room:
            return result
        try:
            digests, buffers = [_digest(key) for key in keys[: len(room)]], [_bytes(memory) for memory in room]
            done = await self._run(self._core.load_into, digests, buffers, room)
            for at, here in enumerate(done.here[: len(room)]):
                if here:
                    room[at].ref_count_up()
                    result[at] = room[at]
        finally:
            _release(room)
        return result

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[CacheEngineKey]) -> Memories:
        """The leading run of what `batched_get` loads."""
        loaded = await self.batched_get(keys)
        run = loaded.index(None) if None in loaded else len(loaded)
        for memory in loaded[run:]:
            if memory is not None:
                memory.ref_count_down()
        return [memory for memory in loaded[:run] if memory is not None]

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Saves one chunk, if it is full."""
        await self.batched_put([key], [memory_obj])

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Saves the full ones of these chunks. What cannot be saved is dropped: it is a cache."""
        full = [
            (key, memory)
            for key, memory in zip(keys, memory_objs)
            if memory.get_size() == self.full_chunk_size_bytes
        ]
        if full:
            memories = [memory for _, memory in full]
            done = await self._run(self._core.save_from, [_digest(key) for key, _ in full], list(map(_bytes, memories)), memories)
            if not done.ok:
                logger.debug("kvasir: %d of %d chunks were not saved: %s", done.here.count(0), len(full), done.error)

    async def close(self) -> None:
        """Ends the connections. Loads and saves under way end first."""
        await asyncio.get_running_loop().run_in_executor(None, self._jobs.close)

    async def _run(self, start: Any, digests: Digests, buffers: Buffers, memories: Sequence[MemoryObj]) -> Done:
        for memory in memories:
            memory.ref_count_up()
        try:
            future = self._jobs.start(lambda job: start(job, self._namespace, digests, buffers))
        except Exception as failure:
            # Whatever it is, such as a buffer that cannot be written: nothing was started.
            _release(memories)
            return Done(False, bytes(len(digests)), 0, f"{type(failure).__name__}: {failure}")
        future.add_done_callback(lambda _: _release(memories))
        return await _result(future)

    def _allocate(self, count: int) -> Memories:
        room: Memories = []
        try:
            while len(room) < count:
                memory = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
                if memory is None:
                    break
                room.append(memory)
        except BaseException:
            _release(room)
            raise
        return room


async def _result(future: Future[Done]) -> Done:
    # A cancelled call does not cancel the copying.
    return await asyncio.shield(asyncio.wrap_future(future))


def _release(memories: Sequence[MemoryObj]) -> None:
    for memory in memories:
        memory.ref_count_down()


def _digest(key: CacheEngineKey) -> bytes:
    return hashlib.sha256(key.to_string().encode()).digest()


def _bytes(memory: MemoryObj) -> memoryview:
    return memoryview(memory.byte_array).cast("B")
