"""Counters of the connector, in vLLM's log line and at its metrics endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRICS = {
    "match_queries": "Matches that the host was asked for.",
    "match_remembered": "Matches answered from memory, as a request that waits is asked for at every step.",
    "match_unavailable": "Matches that the host did not answer in time; counted as no hit.",
    "hit_tokens": "Tokens that requests were promised from the host.",
    "load_requests": "Requests whose load has ended, well or not.",
    "load_failed_requests": "Requests of which a block could not be loaded; vLLM computes it.",
    "load_blocks": "Blocks loaded.",
    "load_failed_blocks": "Blocks that could not be loaded: evicted, damaged, another block's, or late.",
    "load_bytes": "Bytes loaded.",
    "save_blocks": "Blocks saved.",
    "save_failed_blocks": "Blocks that could not be saved.",
    "save_dropped_blocks": "Blocks not saved because saves under way hold the share of blocks that they may.",
    "save_bytes": "Bytes saved.",
    "hand_over_blocks": "Blocks of prompts handed over to the host of a decode engine.",
    "hand_over_failed_blocks": "Blocks of prompts that could not be handed over; the decode engine computes them.",
    "hand_over_refused_requests": "Requests that asked for a hand-over and took the ordinary path; the log says why.",
    "hand_over_bytes": "Bytes handed over.",
    "arrive_tokens": "Tokens that requests awaited from a prefill engine.",
    "arrive_requests": "Requests whose wait for a prefill engine has ended, well or not.",
    "arrive_failed_requests": "Requests whose prompt did not arrive in time or as it should; vLLM computes it.",
    "arrive_blocks": "Blocks received from a prefill engine.",
    "arrive_failed_blocks": "Blocks that did not arrive from a prefill engine.",
    "arrive_bytes": "Bytes received from prefill engines.",
}
"""Every counter and what it counts. At the metrics endpoint it is called `vllm:kvasir_<name>_total`.

Workers each count what they copy: with tensor parallelism a block counts once for each worker that holds a part.
"""


@dataclass
class KvasirStats(KVConnectorStats):
    """Counts since the last step. Empty most of the time."""

    @classmethod
    def of(cls, counts: Counter[str]) -> KvasirStats | None:
        """What was counted, which is then reset; None if nothing was."""
        if not counts:
            return None
        stats = cls(dict(counts))
        counts.clear()
        return stats

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KvasirStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvasir_{name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvasirPromMetrics(KVConnectorPromMetrics):
    """The counters at vLLM's metrics endpoint, one set for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {}
        for name, text in METRICS.items():
            family = counter(name=f"vllm:kvasir_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
