"""What a user writes in `--hicache-storage-backend-extra-config`, and what the engine says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir._connection import Connection, looks_like_a_path

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
    """Name of the model *and* its version. Required where SGLang was given a path, as a path says nothing about weights."""
    weights_version: str = ""
    """A further word that changes with the weights, such as the step of a training run."""
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
        path = engine.get("model_path")
        if not path or looks_like_a_path(path):
            raise ValueError(
                f'kvasir needs "model_id" in {self.where}: the model is {path!r}, and a path says nothing about the weights. '
                'Write the model\'s name and version, such as "model_id": "org/model@revision"'
            )
        return f"{path}@{engine.get('revision') or ''}"


FACTS = {
    "model": ("model_path", "revision", "kv_cache_dtype", "dtype", "quantization", "json_model_override_args"),
    "spec": ("speculative_draft_model_path", "speculative_draft_model_revision"),
    "serving": ("weight_version",),
}
"""Settings of the engine that change what a page holds, by the engine's own groups of settings."""


def engine_facts() -> dict[str, str]:
    """Those of `FACTS` that this version of SGLang has and that are set; empty outside of an engine."""
    try:
        from sglang.srt import runtime_context
    except ImportError:
        return {}
    facts = {}
    for group, names in FACTS.items():
        try:
            bag = getattr(runtime_context, f"get_{group}")()
        except (AttributeError, ValueError):
            continue  # another version of SGLang, or no engine in this process
        for name in names:
            value = getattr(bag, name, None)
            if value is not None:
                facts[name] = str(value)
    return facts
