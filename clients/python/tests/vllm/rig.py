"""vLLM's scheduler and our connector around a model that can be checked byte by byte.

The scheduler, block pool, hashes, aggregation of workers and both halves of the connector are the real ones; only the model
is not. What it "computes" for a token is a number made of all tokens up to there, the rank, the layer and the version of the
weights, and before it computes, it looks at the KV of every earlier token of the request. So wrong KV is found in the step
in which an attention kernel would have read it, whatever the order of loads, saves, preemptions, aborts and faults.
"""

import contextlib
import pickle
import time
from types import SimpleNamespace
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvasir.vllm.connector import KvasirConnector
from kvasir.vllm.messages import HASH_BYTES

BLOCK = 32
PAGE = BLOCK * 8
_PRIME = (1 << 61) - 1


class Fault(Exception):
    """The forward pass fails. vLLM's engine ends then, but its connector is asked to finish the step first."""


class WrongKV(AssertionError):
    """A request would have read KV that is not its own."""


def specs(window: int | None) -> list:
    common = dict(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    full = [FullAttentionSpec(**common)]
    return full if window is None else [*full, SlidingWindowSpec(**common, sliding_window=window)]


def kv_config(blocks: int, kinds: list, replicas: int = 1, layers: int = 1) -> KVCacheConfig:
    """`layers` for each group. Groups lie over each other, as vLLM's do: a block belongs to one of them at a time."""
    groups = [KVCacheGroupSpec([f"layer.{at}.{one}" for one in range(layers)], kind) for at, kind in enumerate(kinds)]
    tensors = [
        KVCacheTensor(
            size=blocks * PAGE,
            layers=[group.layer_names[one] for group in groups],
            layer_stride=0,
            block_stride=PAGE,
        )
        for one in range(layers)
    ]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout="LBHNC",
        hash_block_size=BLOCK,
        kv_tp_replicas=replicas,
    )


def engine_config(model: str, settings: dict, *, ranks: int = 1, blocks: int = 24, **options):
    """A real VllmConfig with our connector."""
    written = {
        "kv_connector": "KvasirConnector",
        "kv_connector_module_path": "kvasir.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
        **options.pop("transfer", {}),
    }
    arguments = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "tensor_parallel_size": ranks,
        "kv_transfer_config": written,
    }
    config = EngineArgs(**(arguments | options)).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    return config


class Rig:
    """An engine without a model. `ranks` workers, each with memory and a connector of its own."""

    def __init__(
        self,
        model,
        settings,
        *,
        ranks=1,
        blocks=24,
        layers=1,
        window=None,
        replicas=1,
        weights=0,
        hash_function=None,
        **options,
    ) -> None:
        self.config = engine_config(model, settings, ranks=ranks, blocks=blocks, **options)
        self.kv = kv_config(blocks, specs(window), replicas, layers)
        self.layers, self.replicas, self.weights = layers, replicas, weights
        self.scheduler = Scheduler(self.config, self.kv, mock.Mock(), BLOCK, BLOCK, log_stats=True)
        self.memory, self.workers = [], []
        for rank in range(ranks):
            memory = [torch.zeros((blocks, 1, BLOCK, 1), dtype=torch.int64) for _ in range(layers)]
            worker = KvasirConnector(self.config, KVConnectorRole.WORKER, self.kv)
            place = "vllm.distributed.parallel_state.get_"
            with (
                mock.patch(place + "tp_group", lambda rank=rank: SimpleNamespace(rank_in_group=rank)),
                mock.patch(place + "pp_group", lambda: SimpleNamespace(rank_in_group=0)),
            ):
                groups = self.kv.kv_cache_groups
                worker.register_kv_caches(
                    {name: one for group in groups for name, one in zip(group.layer_names, memory, strict=True)}
                )
            self.memory.append(memory)
            self.workers.append(worker)
        self.connector.set_xfer_handshake_metadata_pp_aware(self.handshakes())
        self.aggregator = KVOutputAggregator(ranks)
        function = hash_function or get_hash_fn_by_name("sha256_cbor")
        init_none_hash(function)
        self.hasher = get_request_block_hasher(BLOCK, function)
        self.next = 0
        self.reads = 0
        """Entries of KV that were looked at."""
        self.answered: dict[str, dict | None] = {}
        """What requests that have ended gave their client in `kv_transfer_params`."""
        self.after_layer = lambda layer: None
        """Called in the middle of a step, when a layer is computed and the next one is not. It may raise `Fault`."""

    @property
    def connector(self) -> KvasirConnector:
        return self.scheduler.connector

    @property
    def half(self):
        return self.connector.scheduler

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    def handshakes(self) -> dict:
        said = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        return pickle.loads(pickle.dumps({rank: one for rank, one in said.items() if one is not None}))

    def add(self, tokens: list[int], generate: int = 4, transfer: dict | None = None) -> Request:
        self.next += 1
        extra = {"kv_transfer_params": dict(transfer)} if transfer is not None else None
        sampling = SamplingParams(max_tokens=generate, ignore_eos=True, extra_args=extra)
        request = Request(f"r{self.next}", tokens, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step of the engine: schedule, compute, tell the scheduler."""
        output = self.scheduler.schedule()
        metadata = pickle.dumps(output.kv_connector_metadata)
        for worker in self.workers:
            worker.handle_preemptions(None)
            worker.bind_connector_metadata(pickle.loads(metadata))
        answers = []
        with contextlib.suppress(Fault):
            try:
                self._forward(output)
            finally:
                # After the forward pass, as vLLM does where no load is synchronous, and also where it has failed.
                answers += [self._sampled(output, self._moved(worker, output)) for worker in self.workers]
        for outputs in self.scheduler.update_from_output(output, self.aggregator.aggregate(answers)).values():
            self.answered |= {one.request_id: one.kv_transfer_params for one in outputs.outputs if one.finished}

    @staticmethod
    def _moved(worker, output) -> KVConnectorOutput:
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        moved = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        return pickle.loads(pickle.dumps(moved))

    def _sampled(self, output, moved) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self.scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            tokens.append(
                [3 + (len(request.all_token_ids) * 7 + sum(request.all_token_ids[-3:])) % 1000] if done else []
            )
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens, kv_connector_output=moved)

    def _forward(self, output) -> None:
        for layer in range(self.layers) if output.total_num_scheduled_tokens else ():
            self._compute(output, layer)
            for worker in self.workers:
                for group in self.kv.kv_cache_groups:
                    worker.save_kv_layer(group.layer_names[layer], None, None)
            self.after_layer(layer)

    def _compute(self, output, layer: int) -> None:
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            # The scheduler has counted this step's tokens as computed already.
            end = request.num_computed_tokens
            start = end - scheduled
            states = self._states(request.all_token_ids[:end])
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            for group, table in enumerate(tables):
                spec = self.kv.kv_cache_groups[group].kv_cache_spec
                first = max(0, start - (getattr(spec, "sliding_window", None) or start) + 1)
                for rank, layers in enumerate(self.memory):
                    memory = layers[layer]
                    salt = (rank // self.replicas) * 1000 + layer * 50 + group
                    for at in range(first, start):
                        self.reads += 1
                        held = int(memory[table[at // BLOCK], 0, at % BLOCK, 0])
                        if held != states[at] ^ salt:
                            raise WrongKV(
                                f"{name} reads {held} for token {at} of group {group}, layer {layer}, rank {rank}"
                            )
                    for at in range(start, end):
                        memory[table[at // BLOCK], 0, at % BLOCK, 0] = states[at] ^ salt

    def _states(self, tokens) -> list[int]:
        state, states = self.weights + 1, []
        for token in tokens:
            state = (state * 1000003 + token + 1) % _PRIME
            states.append(state)
        return states

    def run(self, limit: int = 20000) -> None:
        """Steps until nothing is left to do, and checks that nothing is held."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise AssertionError(f"not at rest after {limit} steps")
        self.at_rest()

    def at_rest(self) -> None:
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1, "a block is held for ever"
        half = self.half
        assert not half._holds and not half._loading and not half._tracked and half._held == 0
        handing = half.handing
        assert (
            not handing.held
            and not handing._parts
            and not handing._handed
            and not handing._awaited
            and not handing._owners
        )
        for worker in self.workers:
            inner = worker.worker
            assert (
                not inner._running
                and not inner._loading
                and not inner._arriving
                and not inner._bad_requests
                and not inner._bad_blocks
            )

    def forget(self) -> None:
        """Empties vLLM's own prefix cache, and no other."""
        assert self.scheduler.reset_prefix_cache()

    def ask(self, tokens: list[int], generate: int = 4, transfer: dict | None = None) -> Request:
        request = self.add(tokens, generate, transfer)
        self.run()
        return request

    def shutdown(self) -> None:
        self.connector.shutdown()
        for worker in self.workers:
            worker.shutdown()


def answered(rig: Rig) -> None:
    """Waits until the host is asked again, which it is not for a while after it was slow."""
    end = time.monotonic() + 60
    while rig.half._ask([bytes(HASH_BYTES)] * rig.half.frame.groups[0].hashes_per_block) < 0:
        assert time.monotonic() < end, "the host does not answer"
        time.sleep(0.02)


def external(rig: Rig, tokens: list[int], generate: int = 4) -> int:
    """Tokens that a request is given from the host, beyond vLLM's own."""
    before = rig.half.counts["hit_tokens"]
    with mock.patch.object(rig.half, "stats", lambda: None):
        rig.ask(tokens, generate)
    return rig.half.counts["hit_tokens"] - before
