"""What a user writes in `kv_connector_extra_config`, checked once at start."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings of the connector. An unknown or mistyped one is a ValueError at start."""

    host: str
    """`unix:/path` or `tcp://host:port` of the Kvasir host."""
    token: str = field(default="", repr=False)
    """Token of a TCP host. Without it, the environment variable KVASIR_TOKEN is used, which vLLM does not log."""
    tenant: int = 0
    """Tenant whose blocks these are."""
    workload_class: int = 0
    """Class that the host's policies see."""
    model_id: str = ""
    """Name of the model *and* its version. Required where vLLM was given a path, as a path says nothing about weights."""
    weights_version: str = ""
    """A further word that changes with the weights, such as the step of a training run."""
    adapters_version: str = ""
    """A word that changes with the LoRA adapters. Required where there are any: vLLM's hashes know them by name and path."""
    load_threads: int = 2
    """Threads a worker copies loads with, each with a connection of its own."""
    save_threads: int = 1
    """Threads a worker copies saves with."""
    match_ms: int = 20
    """Milliseconds that the scheduler waits for the answer to a match at most."""
    load_ms: int = 2000
    """Milliseconds after which a load has failed and the blocks are computed."""
    save_ms: int = 30000
    """Milliseconds after which a save is given up."""
    save_share: float = 0.25
    """Share of vLLM's blocks that saves under way may hold at most. Beyond it blocks are not saved."""
    save_decode: bool = True
    """Whether blocks that hold generated tokens are saved too, for the next turn of a conversation."""
    verify: bool = True
    """Whether a load compares checksums. Off is for measuring what they cost."""
    allow_fail: bool = False
    """Start although vLLM fails requests whose load fails, instead of computing their blocks."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Settings from a configuration; ValueError that names what is wrong and what there is."""
        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(f"unknown kvasir settings {unknown}; there are {sorted(known)}")
        if not extra.get("host"):
            raise ValueError('kvasir needs "host" in kv_connector_extra_config, such as "unix:/run/kvasir/kvasir.sock"')
        values = dict(extra)
        for name, value in values.items():
            kind = type(getattr(cls, name, ""))
            good = type(value) is kind or (kind is float and type(value) is int)
            if not good:
                shown = "of another type" if name == "token" else repr(value)
                raise ValueError(f"the kvasir setting {name!r} is {shown}; it is a {kind.__name__}")
            if kind in (int, float) and value < 0:
                raise ValueError(f"the kvasir setting {name!r} is {value!r}; it is not negative")
        values.setdefault("token", os.environ.get("KVASIR_TOKEN", ""))
        settings = cls(**values)
        if not 0 < settings.save_share <= 1:
            raise ValueError(f"the kvasir setting 'save_share' is {settings.save_share}; it is in (0, 1]")
        return settings

    def core(self) -> Any:
        """A connection of its own to the host, made when it is first used."""
        from kvasir._core import Core

        return Core(
            self.host,
            token=self.token,
            tenant=self.tenant,
            load_threads=self.load_threads,
            save_threads=self.save_threads,
            match_ms=self.match_ms,
            load_ms=self.load_ms,
            save_ms=self.save_ms,
            verify=self.verify,
            workload_class=self.workload_class,
        )


def named_model(name: str, settings: Settings) -> dict[str, str] | None:
    """Which model this is: the user's word for it, or the commit of a Hugging Face snapshot; None where neither is there."""
    if settings.model_id:
        return {"id": settings.model_id}
    if match := re.search(r"models--([^/]+)/snapshots/([0-9a-f]{40})", os.path.abspath(name)):
        return {"id": match[1].replace("--", "/"), "commit": match[2]}
    return None


def nameless_model(name: str, where: str) -> ValueError:
    """The error for a model of which nobody can tell one set of weights from another."""
    return ValueError(
        f'the model {name!r} does not tell one set of weights from another; add "model_id" to {where}: '
        "a name that changes whenever the weights do"
    )
