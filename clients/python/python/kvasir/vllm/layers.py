"""A worker's layers, as a hand-over by layers sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from kvasir.vllm.geometry import Pages

logger = init_logger("vllm.kvasir.layers")


def uneven(pages: Iterable[Pages]) -> str:
    """Why the layers of a worker's cache cannot be handed over one by one; empty where they can."""
    pages = list(pages)
    if any(one.device is not None for one in pages):
        return "the cache lies in the memory of a GPU, and prompts are handed over from and to the host's memory only"
    sizes = {layer["bytes"] for one in pages for layer in one.layers}
    return "" if len(sizes) == 1 else f"blocks have layers of {sorted(sizes)} bytes, which are not equal pieces"


class Layers:
    """The worker's part: tells the core which layers of a step's hand-overs are computed."""

    def __init__(self, pages: Pages) -> None:
        self._index = {layer["layer"]: at for at, layer in enumerate(pages.layers)}
        self._jobs: list[int] = []
        self._left: set[int] = set()

    def __len__(self) -> int:
        return len(self._index)

    def begin(self, jobs: list[int]) -> None:
        """A step begins, in which these hand-overs' blocks are computed."""
        self._jobs, self._left = jobs, set(range(len(self)))

    def computed(self, core: Any, layer: str) -> None:
        """A layer is final for all tokens of the step. Layers that write to another one's cache have no place of their own."""
        if self._jobs and (at := self._index.get(layer)) is not None:
            self._ready(core, at)

    def finish(self, core: Any) -> None:
        """The step is over: layers that did not say so are final as well."""
        for at in sorted(self._left) if self._jobs else ():
            self._ready(core, at)
        self._jobs = []

    def give_up(self, core: Any) -> None:
        """The step has failed: no further layer is final, and what was handed over of it so far is used by nobody."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            try:
                core.abandon(job)
            except Exception as error:
                logger.warning("kvasir: a hand-over of a step that failed ends only with its time: %s", error)

    def _ready(self, core: Any, at: int) -> None:
        self._left.discard(at)
        try:
            for job in self._jobs:
                core.layer_ready(job, at)
        except Exception as error:
            # A hand-over that hears of no further layer fails by itself.
            logger.warning("kvasir: a layer is not handed over: %s", error)
