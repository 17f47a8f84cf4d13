"""Where a block lies in a worker's memory, and whose block it is."""

from __future__ import annotations

import hashlib
import os
import platform
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.version import __version_tuple__

from kvasir import namespace
from kvasir.vllm.settings import Settings, named_model, nameless_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# Exact classes: a subclass may mean blocks that say less than all about their tokens.
_STORED_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


@dataclass(frozen=True)
class Group:
    """A KV cache group as both halves see it."""

    index: int
    """vLLM's number of the group."""
    block_tokens: int
    """Tokens in a block of the group, over all ranks that share it."""
    hashes_per_block: int
    """Block hashes in a block. A block is known by its last one, which covers the others."""


@dataclass(frozen=True)
class Frame:
    """What tokens, hashes and blocks are to each other."""

    groups: tuple[Group, ...]
    hash_tokens: int
    align_tokens: int
    """Hits are multiples of this."""

    @classmethod
    def of(cls, config: VllmConfig, kv: KVCacheConfig) -> Frame:
        align, per_hash = resolve_kv_cache_block_sizes(kv, config)
        dcp = config.parallel_config.decode_context_parallel_size
        groups = []
        for index, group in enumerate(kv.kv_cache_groups):
            tokens = resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)
            groups.append(Group(index, tokens, max(1, tokens // per_hash)))
        return cls(tuple(groups), per_hash, align)


def unsupported(config: VllmConfig, kv: KVCacheConfig) -> str | None:
    """Why this model's blocks are neither loaded nor saved, or None if they are.

    A model that is not listed here runs as if there were no connector; that is slower, and right.
    """
    for group in kv.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        for one in specs:
            if type(one) not in _STORED_SPECS:
                return (
                    f"the KV cache has a group of {type(one).__name__}, whose blocks depend on more than their tokens"
                )
            if getattr(one, "non_causal", False):
                return "the model has layers that attend to later tokens, which a block's hash does not cover"
        if group.is_eagle_group:
            return "a draft model shares the KV cache, and its last entry in a block depends on the token after it"
        if group.host_resident or not group.enable_kv_transfer or not spec.prefix_cacheable:
            return "vLLM keeps a KV cache group of this model out of external caches"
    if not kv.kv_cache_groups:
        return "the model has no KV cache"
    if config.parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism is not supported yet"
    quantised = get_kv_quant_mode(config.cache_config.cache_dtype)
    if quantised not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        return f"the KV cache type {config.cache_config.cache_dtype!r} may keep its scales outside of the blocks"
    return None


def model_identity(config: VllmConfig, settings: Settings) -> dict[str, Any]:
    """Which weights compute these blocks. ValueError where that cannot be told."""
    model = config.model_config
    text = namespace.canonical(_plain(model.hf_config.to_dict()))
    identity: dict[str, Any] = {
        "architecture": hashlib.sha256(text).hexdigest(),
        "compute_dtype": str(model.dtype),
        "quantization": model.quantization,
        "weights_version": settings.weights_version,
        "adapters_version": settings.adapters_version,
    }
    if named := named_model(model.model, settings):
        return identity | named
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and not os.path.exists(model.model):
        return identity | {"id": model.model, "commit": commit}
    raise nameless_model(model.model, "kv_connector_extra_config")


def _plain(value: Any) -> Any:
    """A model's configuration without what says nothing about its KV, floats as exact text."""
    if isinstance(value, dict):
        skipped = ("_name_or_path", "_commit_hash", "transformers_version")
        return {str(key): _plain(inner) for key, inner in value.items() if key not in skipped}
    if isinstance(value, (list, tuple, set)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    return value.hex() if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Shard:
    """A worker's place among those that share the model."""

    tensor: int
    tensors: int
    pipeline: int
    pipelines: int
    context_size: int
    replica: int
    """Position among the ranks that hold the same bytes."""
    replicas: int

    @classmethod
    def of(cls, config: VllmConfig, kv: KVCacheConfig, tensor: int, pipeline: int) -> Shard:
        parallel = config.parallel_config
        replicas = max(1, kv.kv_tp_replicas)
        return cls(
            tensor=tensor // replicas,
            tensors=max(1, parallel.tensor_parallel_size // replicas),
            pipeline=pipeline,
            pipelines=parallel.pipeline_parallel_size,
            context_size=parallel.decode_context_parallel_size,
            replica=tensor % replicas,
            replicas=replicas,
        )


class Pages:
    """The memory of one group's blocks in one worker."""

    def __init__(self, caches: dict[str, torch.Tensor], layers: list[str], blocks: int) -> None:
        """ValueError where the blocks do not lie as whole pages in the memory of the host or of one GPU."""
        self.tensors = [caches[name] for name in layers]
        self.blocks = blocks
        self.device = _device(layers, self.tensors)
        runs: list[tuple[int, int, int]] = []
        self.layers: list[dict[str, Any]] = []
        for name, cache in zip(layers, self.tensors, strict=True):
            run = _run(name, cache, blocks)
            # Layers may share their cache with an earlier one: one address, one run.
            if run not in runs:
                runs.append(run)
                self.layers.append({"layer": name, "bytes": run[1], "dtype": str(cache.dtype)})
        self.runs = b"".join(struct.pack("<3Q", *run) for run in runs)

    def stream(self) -> int:
        """The driver's handle of the stream in which vLLM computes now; 0 on the host."""
        return 0 if self.device is None else int(torch.cuda.current_stream(self.device).cuda_stream)


def _device(layers: list[str], caches: list[Any]) -> int | None:
    """The GPU that has all layers, by PyTorch's number; None is the host."""
    devices = [getattr(cache, "device", None) for cache in caches]
    for name, device in zip(layers, devices, strict=True):
        if device is not None and device != devices[0]:
            raise ValueError(f"the cache of the layer {name} lies on {device}, others on {devices[0]}")
    first = devices[0] if devices else None
    return first.index or 0 if first is not None and first.type == "cuda" else None


def _run(name: str, cache: Any, blocks: int) -> tuple[int, int, int]:
    if not isinstance(cache, torch.Tensor):
        raise ValueError(f"the cache of the layer {name} is a {type(cache).__name__}, not a tensor")
    # ROCm calls its devices "cuda" as well, and has another driver.
    if cache.device.type not in ("cpu", "cuda") or (cache.is_cuda and torch.version.cuda is None):
        raise ValueError(f"the cache of the layer {name} lies in the memory of {cache.device}; see KvasirTier")
    # A kernel's blocks may be a part of the manager's: the first dimension then is a multiple of the blocks.
    if cache.shape[0] == 0 or cache.shape[0] % blocks or not cache[0].is_contiguous():
        raise ValueError(
            f"the cache of the layer {name} has the shape {tuple(cache.shape)} and strides {cache.stride()}, "
            f"which are not {blocks} whole pages"
        )
    parts = cache.shape[0] // blocks
    page, stride = cache[0].nbytes, cache.stride(0) * cache.element_size()
    if parts > 1 and stride != page:
        raise ValueError(f"the cache of the layer {name} has pages in {parts} parts that do not touch")
    return cache.data_ptr(), page * parts, stride * parts


def group_namespace(
    config: VllmConfig, kv: KVCacheConfig, settings: Settings, frame: Frame, group: Group, pages: Pages, shard: Shard
) -> dict[str, Any]:
    """Everything that a block of this group on this worker must agree in with a block that it is replaced by."""
    spec = kv.kv_cache_groups[group.index].kv_cache_spec
    return {
        "schema": namespace.SCHEMA,
        "engine": "vllm",
        # The layout inside a page is a kernel's business and may change with a release.
        "engine_version": [int(part) for part in __version_tuple__[:2]],
        "model": model_identity(config, settings),
        "kv_dtype": str(config.cache_config.cache_dtype),
        "hash": {"algorithm": config.cache_config.prefix_caching_hash_algo, "tokens": frame.hash_tokens},
        "group": {"index": group.index, "count": len(frame.groups), "block_tokens": group.block_tokens} | _spec(spec),
        "pages": {"layout": kv.kv_cache_layout, "layers": pages.layers},
        "kernel": _kernel(config, kv.kv_cache_groups[group.index].layer_names, pages.device),
        "shard": {
            "tp": shard.tensor,
            "tp_size": shard.tensors,
            "pp": shard.pipeline,
            "pp_size": shard.pipelines,
            "dcp_size": shard.context_size,
            # With context parallelism every rank holds other tokens; the tensor rank above tells them apart.
        },
    }


def _spec(spec: KVCacheSpec) -> dict[str, Any]:
    first = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return {
        "kind": type(first).__name__,
        "block_size": first.block_size,
        "window": getattr(first, "sliding_window", None),
        "heads": getattr(first, "num_kv_heads", None),
        "head_size": getattr(first, "head_size", None),
    }


def _kernel(config: VllmConfig, layers: list[str], device: int | None) -> dict[str, Any]:
    """Which attention kernel packs the pages: those for CPUs choose the order of keys by instruction set."""
    context = config.compilation_config.static_forward_context
    backends = {_backend(context.get(name)) for name in layers}
    if device is not None:
        capability = torch.cuda.get_device_capability(device)
        return {"backends": sorted(backends), "device": "cuda", "capability": list(capability)}
    return {
        "backends": sorted(backends),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)()),
    }


def _backend(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else "unknown"
