"""LMCache's own memory, keys and configuration."""

from __future__ import annotations

import argparse
import json
import select
import time
from collections.abc import Callable
from typing import Any

import torch
from lmcache.v1.distributed import config as configuration
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

CHUNK = MemoryLayoutDesc([torch.Size([2, 4, 256, 64])], [torch.bfloat16])
"""A chunk of 256 tokens: K and V, 4 layers, 64 numbers a token."""

WAIT_S = 300
"""After this a test has failed: LMCache's threads said nothing."""


def key(number: int, model: str = "org/model", **more: Any) -> ObjectKey:
    """The key of a chunk with a hash of 32 B, as the server's blake3 gives."""
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), model_name=model, kv_rank=ObjectKey.ComputeKVRank(1, 0, 1, 0), **more)


def plugin(endpoint: str, **more: Any) -> dict[str, Any]:
    """What a user writes after `--l2-adapter`. The deadline is long, as a machine that runs tests answers late."""
    params = {"host": endpoint, "model_id": "org/model@1", "kv_dtype": "bfloat16", "match_ms": 5000, **more}
    return {"type": "native_plugin", "module_path": "kvasir.lmcache", "class_name": "KvasirClient", "adapter_params": params}


def manager_config(adapter: dict[str, Any]) -> Any:
    """The server's storage configuration, from its command line."""
    parser = argparse.ArgumentParser()
    configuration.add_storage_manager_args(parser)
    line = ["--l1-size-gb", "0.0625", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
    return configuration.parse_args_to_config(parser.parse_args(line))


def wait(descriptor: int) -> None:
    """Waits until the descriptor is readable."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(WAIT_S * 1000), "nothing was reported"


def until(condition: Callable[[], bool]) -> None:
    """Asks again until it is so; fails after WAIT_S."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "what was waited for did not come"
        # What is waited for may need this core.
        time.sleep(0.01)
