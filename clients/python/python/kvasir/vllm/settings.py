"""What a user writes in `kv_connector_extra_config`, checked once at start."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import ClassVar

from kvasir._connection import Connection


@dataclass(frozen=True)
class Settings(Connection):
    """Settings of the connector and of the tier."""

    model_id: str = ""
    """Name of the model *and* its version. Required where vLLM was given a path, as a path says nothing about weights."""
    weights_version: str = ""
    """A further word that changes with the weights, such as the step of a training run."""
    adapters_version: str = ""
    """A word that changes with the LoRA adapters. Required where there are any: vLLM's hashes know them by name and path."""
    save_share: float = 0.25
    """Share of vLLM's blocks that saves under way may hold at most. Beyond it blocks are not saved."""
    save_decode: bool = True
    """Whether blocks that hold generated tokens are saved too, for the next turn of a conversation."""
    hand_over_to: str = ""
    """Name of the Kvasir host beside the decode engine, for prompts that are handed over and whose request names none."""
    hand_over_ms: int = 10_000
    """Milliseconds that a request waits at most for a prompt that another engine hands over; at least 1."""
    allow_fail: bool = False
    """Start although vLLM fails requests whose load fails, instead of computing their blocks."""

    where: ClassVar[str] = "kv_connector_extra_config"

    def __post_init__(self) -> None:
        if not 0 < self.save_share <= 1:
            raise ValueError(f"the kvasir setting 'save_share' is {self.save_share}; it is in (0, 1]")
        if self.hand_over_ms < 1:
            raise ValueError(
                f"the kvasir setting 'hand_over_ms' is {self.hand_over_ms}; it is at least 1. A request without "
                '"do_remote_prefill" waits for nothing'
            )


def named_model(name: str, settings: Settings) -> dict[str, str] | None:
    """Which model this is: the user's word for it, or the commit of a Hugging Face snapshot; None if neither is there."""
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
