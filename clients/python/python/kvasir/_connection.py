"""Settings that every engine's connector shares: which host, as whom, and how long to wait for it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from kvasir._core import Core

Self = TypeVar("Self", bound="Connection")


@dataclass(frozen=True)
class Connection:
    """How a connector reaches its host. An unknown or mistyped setting is a ValueError at start."""

    host: str
    """`unix:/path` or `tcp://host:port` of the Kvasir host."""
    token: str = field(default="", repr=False)
    """Token of a TCP host. Without it, the environment variable KVASIR_TOKEN is used, which no engine logs."""
    tenant: int = 0
    """Tenant whose blocks these are."""
    workload_class: int = 0
    """Class that the host's policies see."""
    load_threads: int = 8
    """Threads that copy loads, each with a connection of its own."""
    save_threads: int = 2
    """Threads that copy saves, each with a connection of its own."""
    match_ms: int = 20
    """Milliseconds that a question whether blocks are there waits at most."""
    load_ms: int = 2000
    """Milliseconds after which a load has failed."""
    save_ms: int = 30000
    """Milliseconds after which a save is given up."""
    verify: bool = True
    """Whether a load compares checksums. Off is for measuring what they cost."""

    where: ClassVar[str] = "the settings"
    """Where the user writes these, for errors."""

    @classmethod
    def parse(cls: type[Self], given: Mapping[str, Any]) -> Self:
        """Settings from a configuration; ValueError that names what is wrong and what there is."""
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"unknown kvasir settings {unknown} in {cls.where}; there are {sorted(known)}")
        if not given.get("host"):
            raise ValueError(f'kvasir needs "host" in {cls.where}, such as "unix:/run/kvasir/kvasir.sock"')
        for name, value in given.items():
            kind = type(getattr(cls, name, ""))
            if type(value) is not kind and not (kind is float and type(value) is int):
                wrong = f"a {type(value).__name__}" if name == "token" else repr(value)
                raise ValueError(f"the kvasir setting {name!r} in {cls.where} is {wrong}; it is a {kind.__name__}")
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"the kvasir setting {name!r} in {cls.where} is {value!r}; it is not negative")
        return cls(**{"token": os.environ.get("KVASIR_TOKEN", ""), **given})

    def core(self) -> Core:
        """A client of its own, which connects when it is first used."""
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


def release(version: str) -> list[int]:
    """Major and minor number of an engine's version: how it lays out its cache may change between them."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
