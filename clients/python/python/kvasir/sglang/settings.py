"""What a user writes in `--hicache-storage-backend-extra-config`, and what the engine says of itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir._connection import Connection

HUGGING_FACE = re.compile(r"[\w.-]+(/[\w.-]+)?")
COMMIT = re.compile("[0-9a-f]{40}")

OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size")
"""Entries of the same dict that SGLang reads."""

EXAMPLE = (
    '{"backend_name": "kvasir", "module_path": "kvasir.sglang", "class_name": "KvasirStorage", "interface_v1": 1, '
    '"host": "unix:/run/kvasir/kvasir.sock"}'
)


@dataclass(frozen=True)
class Settings(Connection):
    """Settings of the storage backend."""

    model_id: str = ""
    """Name of the model *and* its version. Required unless SGLang was given a Hugging Face name and a commit."""
    weights_version: str = ""
    """A further word that changes with the weights, such as the step of a training run."""
    adapters_version: str = ""
    """Name of this set of LoRA adapters and their versions. Required with LoRA: SGLang's hashes name adapters by path."""
    kv_dtype: str = ""
    """Type of the cached numbers. Required only where the pool holds bytes and SGLang does not say what they mean."""

    where: ClassVar[str] = "--hicache-storage-backend-extra-config"

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Settings:
        """The settings in SGLang's extra config; ValueError with what to write."""
        extra = dict(extra or {})
        if not extra.get("interface_v1"):
            raise ValueError(
                'kvasir needs "interface_v1": 1 in --hicache-storage-backend-extra-config; without it SGLang copies every '
                f"page twice through calls that it deprecates. Write {EXAMPLE}"
            )
        return cls.parse({name: value for name, value in extra.items() if name not in OF_SGLANG})

    def model(self, engine: Mapping[str, Any]) -> str:
        """What the weights are called; ValueError if nothing names them."""
        if self.model_id:
            return self.model_id
        path, revision = engine.get("model_path", ""), engine.get("revision", "")
        # Only a commit names weights: what lies at a path, a branch or a tag may be replaced. A folder has no commit.
        if os.path.exists(path) or not HUGGING_FACE.fullmatch(path) or not COMMIT.fullmatch(revision):
            raise ValueError(
                f'kvasir needs "model_id" in {self.where}: the model is {path!r} at revision {revision!r}, which does not tell '
                'one set of weights from another. Write the model\'s name and version, such as "model_id": '
                '"org/model@revision", or give SGLang a Hugging Face name and --revision with a commit of 40 hex digits'
            )
        return f"{path}@{revision}"


FACTS = {
    "model": ("model_path", "revision", "kv_cache_dtype", "dtype", "quantization", "json_model_override_args"),
    "spec": ("speculative_draft_model_path", "speculative_draft_model_revision"),
    "serving": ("weight_version",),
}
"""Settings of the engine that change what a page holds, by the engine's own groups of settings."""


def engine_facts() -> dict[str, str]:
    """Those of `FACTS` that this version of SGLang has and that are set; empty outside of an engine."""
    facts = {}
    for group, names in FACTS.items():
        bag = _bag(group)
        for name in names:
            value = getattr(bag, name, None)
            if value is not None:
                facts[name] = str(value)
    return facts


def has_adapters() -> bool:
    """Whether the engine in this process serves LoRA adapters."""
    bag = _bag("lora")
    return bool(getattr(bag, "enable_lora", None) or getattr(bag, "lora_paths", None))


def _bag(group: str) -> Any:
    """One group of the engine's settings; None in another version of SGLang, or without an engine in this process."""
    try:
        from sglang.srt import runtime_context

        return getattr(runtime_context, f"get_{group}")()
    except (ImportError, AttributeError, ValueError):
        return None
