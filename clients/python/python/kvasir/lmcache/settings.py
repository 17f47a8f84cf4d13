"""What a user writes for LMCache, and which of its keys may be stored."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kvasir._connection import Connection, release
from kvasir.namespace import SCHEMA, canonical, digest

logger = logging.getLogger(__name__)

Self = TypeVar("Self", bound="Settings")

HASH_BYTES_LEAST = 16
"""Chunk hashes below this can meet by chance. LMCache's "builtin" gives 8 bytes, its server's blake3 and SHA-256 give 32."""


class Refused(ValueError):
    """A key that cannot be stored safely, and what to change."""


@dataclass(frozen=True)
class Settings(Connection):
    """Settings of the client. LMCache's keys name the model, the rank and the chunk; the rest is said here."""

    model_id: str = ""
    """Name of the model *and* its version. Required: LMCache's keys name the model, and not which weights."""
    weights_version: str = ""
    """A further word that changes with the weights, such as the step of a training run."""
    kv_dtype: str = ""
    """Type of the cached numbers, such as "bfloat16". Required with LMCache's server, whose keys do not say it."""

    where: ClassVar[str] = "LMCache's configuration"
    example: ClassVar[str] = '"model_id": "org/model@revision"'
    """How a user writes the model there."""

    @classmethod
    def parse(cls: type[Self], given: Mapping[str, Any]) -> Self:
        """Settings from a configuration; ValueError that names what is wrong and what to write."""
        settings = super().parse(given)
        if not settings.model_id:
            raise ValueError(
                f'kvasir needs "model_id" in {cls.where}: LMCache\'s keys do not say which weights a model has. Write its name '
                f"and version, such as {cls.example}"
            )
        return settings

    def namespace(self, **fields: Any) -> bytes:
        """Digest of what LMCache's keys do not say."""
        named = {
            "schema": SCHEMA,
            "engine": "lmcache",
            "engine_version": release(importlib.metadata.version("lmcache")),
            "model": self.model_id,
            "weights_version": self.weights_version,
            "kv_dtype": self.kv_dtype,
            **fields,
        }
        made = digest(named)
        # For `python -m kvasir explain`, which says why two engines do not share.
        logger.info("kvasir namespace %s: %s", made.hex(), canonical(named).decode())
        return made


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


@dataclass(frozen=True)
class ProcessSettings(Settings):
    """Settings of the connector in the engine's process."""

    allow_weak_hash: bool = False
    """Store although chunks are named by Python's own hash, for which anybody can make two prompts that meet."""

    where: ClassVar[str] = "extra_config"
    example: ClassVar[str] = "remote_storage_plugin.kvasir.model_id: org/model@revision"

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
