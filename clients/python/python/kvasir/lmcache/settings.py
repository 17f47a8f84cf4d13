"""What a user writes for LMCache, and which of its keys may be stored."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir._connection import Connection, looks_like_a_path
from kvasir.namespace import SCHEMA, canonical, digest

logger = logging.getLogger(__name__)

HASH_BYTES_LEAST = 16
"""Chunk hashes below this can meet by chance. LMCache's "builtin" gives 8 bytes, its server's blake3 and SHA-256 give 32."""


class Refused(ValueError):
    """A key that cannot be stored safely, and what to change."""


@dataclass(frozen=True)
class Settings(Connection):
    """Settings of the client. LMCache's keys name the model, the rank and the chunk; the rest is said here."""

    model_id: str = ""
    """Name of the model *and* its version. Required where the engine was given a path."""
    weights_version: str = ""
    """A further word that changes with the weights, such as the step of a training run."""
    kv_dtype: str = ""
    """Type of the cached numbers, such as "bfloat16". Required with LMCache's server, whose keys do not say it."""

    where: ClassVar[str] = "LMCache's configuration"

    def namespace(self, **fields: Any) -> bytes:
        """Digest of what LMCache's keys do not say."""
        named = {
            "schema": SCHEMA,
            "engine": "lmcache",
            "model": self.model_id or "as the keys say",
            "weights_version": self.weights_version,
            "kv_dtype": self.kv_dtype,
            **fields,
        }
        made = digest(named)
        # For `python -m kvasir explain`, which says why two engines do not share.
        logger.info("kvasir namespace %s: %s", made.hex(), canonical(named).decode())
        return made

    def check_model(self, model: str) -> None:
        """Raises `Refused` if nothing names the weights."""
        if not self.model_id and _is_path(model):
            raise Refused(
                f'the model is {model!r}, and a path says nothing about the weights: write "model_id" in {self.where}, '
                'such as "org/model@revision"'
            )


@dataclass(frozen=True)
class ServerSettings(Settings):
    """Settings of `KvasirClient`, LMCache's `adapter_params`."""

    where: ClassVar[str] = "adapter_params"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ServerSettings:
        """The settings in `given`; ValueError with what to write."""
        settings = cls.parse(given)
        if not settings.kv_dtype:
            raise ValueError(
                f'kvasir needs "kv_dtype" in {cls.where}: LMCache\'s keys do not say the type of the cached numbers, and '
                'bfloat16 and float16 chunks have the same key and size. Write such as "kv_dtype": "bfloat16"'
            )
        return settings

    def check_key(self, key: str) -> None:
        """Raises `Refused` for a key that cannot be told from another chunk's.

        LMCache writes `model@kv_rank@group@chunk_hash`, hexadecimal, and `@salt` where there is one.
        """
        parts = key.split("@")
        if len(parts) < 4:
            raise Refused(f"the key {key!r} is not of the form model@kv_rank@group@chunk_hash that LMCache 0.5.6 writes")
        if len(parts[3]) < 2 * HASH_BYTES_LEAST:
            raise Refused(
                f"chunk hashes of {4 * len(parts[3])} bits can meet by chance, and one chunk would be taken for another: "
                "start LMCache's server with --hash-algorithm blake3, its default"
            )
        self.check_model(parts[0])


@dataclass(frozen=True)
class ProcessSettings(Settings):
    """Settings of the connector in the engine's process."""

    allow_weak_hash: bool = False
    """Store although chunks are named by Python's own hash, for which anybody can make two prompts that meet."""

    where: ClassVar[str] = "extra_config"

    def check_hash(self, algorithm: str) -> None:
        """Raises ValueError if LMCache names chunks by Python's own hash.

        In the engine's process LMCache keeps 64 bits of any hash. Of a SHA-256 that is enough against chance (a billion
        chunks of one model meet once in some 40 tries), not against somebody who searches.
        """
        if algorithm != "builtin" and not _has_vllm_hashes():
            algorithm = "builtin"  # which LMCache falls back to, with a warning only
        if algorithm == "builtin" and not self.allow_weak_hash:
            raise ValueError(
                "LMCache names chunks by Python's own hash, and two prompts that meet are easily made: set "
                'pre_caching_hash_algorithm: "sha256_cbor" (LMCache takes it from vLLM), or '
                "remote_storage_plugin.kvasir.allow_weak_hash: true where all prompts are trusted"
            )


def _has_vllm_hashes() -> bool:
    for module in ("vllm.utils.hashing", "vllm.utils"):
        try:
            return callable(importlib.import_module(module).get_hash_fn_by_name)
        except (ImportError, AttributeError):
            continue
    return False


@functools.lru_cache(maxsize=64)
def _is_path(model: str) -> bool:
    return looks_like_a_path(model)
