"""Prefill in one engine, decode in another: which prompts are handed over while they are computed, and which are awaited.

Requests say so in `kv_transfer_params`, as proxies of vLLM write them. The blocks that a step completes are a part of the
prompt and travel together, each layer as soon as it is computed. Whatever is not handed over, the decode engine computes.

Nothing here is a cache: the blocks of a hand-over are read once, by the engine that awaits them.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvasir.vllm.geometry import Frame
    from kvasir.vllm.settings import Settings

logger = init_logger("vllm.kvasir.handing")

TRANSFER_BYTES_MAX = 256
"""What the native half takes as a transfer's name."""

HELD_SHARE_MAX = 0.5
"""Share of vLLM's blocks that hand-overs under way may hold when another one begins."""

PART_BLOCKS_MAX = 8192
"""Blocks of a part. Of prompts with more, a step hands several parts over."""

PAUSE_SECONDS = 5.0
"""How long nothing is handed over to a host after a hand-over to it has failed: every decode request would wait in vain."""

_WHOLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class _Handed:
    """A prompt that this engine computes for another one."""

    peer: str
    transfer: bytes
    blocks: int
    """Full blocks of the prompt: what the other engine awaits."""
    done: int = 0
    """Blocks in parts that have begun."""
    failed: bool = False


@dataclass
class _Awaited:
    """A prompt that another engine computes for this one."""

    transfer: bytes
    taken: bool = False
    """A request awaits its blocks once. What does not come is computed."""
    job: int = 0


def not_handed(config: VllmConfig, kv: KVCacheConfig, settings: Settings) -> str:
    """Why prompts of this engine are neither handed over nor awaited; empty if they are."""
    parallel = config.parallel_config
    if not settings.host.startswith("unix:"):
        return "a hand-over needs a Kvasir host at a Unix socket"
    if len(kv.kv_cache_groups) != 1:
        return f"the model has {len(kv.kv_cache_groups)} groups of KV cache, and a hand-over is of one"
    spec = kv.kv_cache_groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for one in specs:
        if type(one) not in (FullAttentionSpec, MLAAttentionSpec) or getattr(one, "sliding_window", None):
            return f"the model has layers of {type(one).__name__} that do not see all earlier tokens"
    if kv.kv_tp_replicas > 1:
        return f"{kv.kv_tp_replicas} tensor-parallel ranks hold the same heads"
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "pipeline and context parallelism are not handed over yet"
    if parallel.use_ubatching:
        return "with micro-batches a layer is computed in several goes"
    return ""


class Handing:
    """The scheduler's part. Every request is looked at once; what was found holds until it ends."""

    def __init__(
        self, config: VllmConfig, kv: KVCacheConfig, frame: Frame, settings: Settings, counts: Counter[str]
    ) -> None:
        self.settings, self.frame, self.counts = settings, frame, counts
        self.engine_id = config.kv_transfer_config.engine_id if config.kv_transfer_config is not None else None
        self.off = not_handed(config, kv, settings)
        self.held = 0
        """Blocks that hand-overs under way refer to."""
        self.abandoned: list[int] = []
        """Jobs that nobody awaits any more; the next step tells the workers."""
        self._held_max = int(kv.num_blocks * HELD_SHARE_MAX)
        self._handed: dict[str, _Handed | None] = {}
        self._awaited: dict[str, _Awaited | None] = {}
        self._owners: dict[bytes, str] = {}
        """Request of a transfer. Several samples of one prompt are several requests of one transfer: the first has it."""
        self._parts: dict[int, tuple[str, str]] = {}
        """Request and peer of each hand-over under way. They outlive the request."""
        self._paused: dict[str, float] = {}
        """Until when nothing is handed over to a peer."""
        self._warned: set[str] = set()

    def meet(self, reasons: Iterable[str]) -> None:
        """Learns from the workers whether their layers can be handed over one by one."""
        self.off = self.off or next((reason for reason in reasons if reason), "")

    # Decode

    def awaited(self, request: Request) -> int:
        """Leading tokens of the prompt that another engine hands over; 0 once they have been awaited."""
        one = self._expected(request)
        return 0 if one is None or one.taken or self.off else self._blocks(request) * self.frame.align_tokens

    def _expected(self, request: Request) -> _Awaited | None:
        if request.request_id not in self._awaited:
            self._awaited[request.request_id] = self._expect(request)
        return self._awaited[request.request_id]

    def _expect(self, request: Request) -> _Awaited | None:
        params = _params(request, "do_remote_prefill")
        if params is None or not self._blocks(request):
            return None
        transfer = _transfer(params)
        if self.off or transfer is None:
            self._refuse("awaited", self.off or "kv_transfer_params name no transfer_id of 1 to 256 bytes")
            return None
        return _Awaited(transfer) if self._owns(request, transfer) else None

    def take(self, request: Request, job: int) -> bytes:
        """The transfer to ask for. It is asked for once: later matches of the request are ordinary ones."""
        one = self._expected(request)
        assert one is not None
        one.taken, one.job = True, job
        return one.transfer

    def settle(self, request: Request) -> None:
        """The request has its blocks without a hand-over, which by its next match is long over."""
        if one := self._awaited.get(request.request_id):
            one.taken = True

    # Prefill

    def next_part(self, request: Request, computed: int) -> tuple[int, int] | None:
        """Blocks [first, last) of the prompt that are complete after this step and not handed over yet.

        None means that there are no more: a step that completes very many blocks has several parts of a request.
        """
        one = self._handed_over(request)
        if one is None or one.failed or self.off:
            return None
        last = min(computed // self.frame.align_tokens, one.blocks, one.done + PART_BLOCKS_MAX)
        return (one.done, last) if last > one.done else None

    def begun(self, request: Request, last: int, job: int) -> tuple[str, bytes]:
        """Takes note of a part that ends before the block `last`. Returns the peer and the transfer."""
        one = self._handed_over(request)
        assert one is not None
        one.done = last
        self._parts[job] = request.request_id, one.peer
        return one.peer, one.transfer

    def broken(self, job: int) -> None:
        """A part was not handed over. Those after it are of no use to anybody, and the next prompts would fare no better."""
        if job not in self._parts:
            return
        request_id, peer = self._parts[job]
        if one := self._handed.get(request_id):
            one.failed = True
        now = time.monotonic()
        # Requests name peers, so this must not grow with what they make up.
        self._paused = {name: until for name, until in self._paused.items() if until > now}
        self._paused[peer] = now + PAUSE_SECONDS

    def ended(self, job: int) -> None:
        """All workers are done with a part, well or not."""
        self._parts.pop(job, None)

    def _handed_over(self, request: Request) -> _Handed | None:
        if request.request_id not in self._handed:
            self._handed[request.request_id] = self._hand(request)
        return self._handed[request.request_id]

    def _hand(self, request: Request) -> _Handed | None:
        params = _params(request, "do_remote_decode")
        if params is None or not (blocks := self._blocks(request)):
            return None
        # Proxies for vLLM's own connectors send the name with None in it.
        peer = params.get("remote_host") or self.settings.hand_over_to
        if self.off or not isinstance(peer, str) or not peer:
            self._refuse("handed over", self.off or 'neither kv_transfer_params nor "hand_over_to" name a host')
            return None
        if self._paused.get(peer, 0.0) > time.monotonic():
            self._refuse("handed over", f"a hand-over to the same host failed less than {PAUSE_SECONDS:g} s ago")
            return None
        if self.held > self._held_max:
            self._refuse("handed over", "hand-overs under way hold more than half of vLLM's blocks")
            return None
        transfer = _transfer(params) if params.get("transfer_id") else f"kvasir-{uuid.uuid4().hex}".encode()
        if transfer is None:
            self._refuse("handed over", "the transfer_id in kv_transfer_params is no text of 1 to 256 bytes")
            return None
        return _Handed(peer, transfer, blocks) if self._owns(request, transfer) else None

    # Both

    def finished(self, request: Request, loading: bool) -> dict[str, Any] | None:
        """The request has ended: what the proxy passes on to the decode engine. None if it would wait in vain."""
        handed = self._handed.pop(request.request_id, None)
        awaited = self._awaited.pop(request.request_id, None)
        for one in (handed, awaited):
            if one is not None and self._owners.get(one.transfer) == request.request_id:
                del self._owners[one.transfer]
        if awaited is not None and awaited.job and loading:
            self.abandoned.append(awaited.job)
        whole = handed is not None and not handed.failed and handed.done == handed.blocks
        if _params(request, "do_remote_decode") is not None and not self._blocks(request):
            # No loss: of a prompt without a whole block nothing is handed over, and a decode engine waits for nothing.
            return {"do_remote_prefill": False, "do_remote_decode": False}
        if handed is None or not whole or request.status not in _WHOLE:
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": handed.transfer.decode(),
            "remote_engine_id": self.engine_id,
            "remote_host": handed.peer,
        }

    def reset(self, loading: set[str]) -> None:
        """The cache was reset. No other engine shares the new keys, and what is awaited under the old ones is not used."""
        self.off = self.off or "the cache was reset, and its new keys are this engine's own until it is restarted"
        self.abandoned += [one.job for name, one in self._awaited.items() if one is not None and name in loading]

    def _blocks(self, request: Request) -> int:
        """Full blocks of the prompt, all of which have hashes."""
        tokens = min(request.num_prompt_tokens, len(request.block_hashes) * self.frame.hash_tokens)
        return tokens // self.frame.align_tokens

    def _owns(self, request: Request, transfer: bytes) -> bool:
        return self._owners.setdefault(transfer, request.request_id) == request.request_id

    def _refuse(self, what: str, reason: str) -> None:
        """Says once for each reason why a request that asks for a hand-over takes the ordinary path."""
        self.counts["hand_over_refused_requests"] += 1
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("kvasir: a prompt is not %s, but computed and cached as ever: %s", what, reason)


def _params(request: Request, what: str) -> dict[str, Any] | None:
    """A request's `kv_transfer_params`, if they ask for this."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) and params.get(what) else None


def _transfer(params: dict[str, Any]) -> bytes | None:
    """A transfer's name as bytes, or None if there is none that can be used."""
    given = params.get("transfer_id")
    name = given.encode(errors="replace") if isinstance(given, str) else b""
    return name if 1 <= len(name) <= TRANSFER_BYTES_MAX else None
