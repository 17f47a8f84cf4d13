"""Sends a request where its first token comes soonest, and its decoding to the instance with the fewest sequences."""

from collections.abc import Iterable
from math import inf

from kvasir import Cluster, D, Decision, Description, P, Reason, Request, Scheduler, reject


def first_tokens(now: float, request: Request, cluster: Cluster) -> Iterable[float]:
    """Time until the prefill at each slot is done, ms; infinite if it cannot serve the request."""
    for slot, row in enumerate(cluster.prefill.rows):
        if row[P.AVAILABLE] != 1 or (request.prefill_fit and not request.prefill_fit[slot]):
            yield inf
            continue
        stored = request.prefix[slot] * cluster.block_tokens if request.prefix else 0
        computed = max(request.prompt_tokens - stored, 0)
        wait = max(row[P.BUSY_UNTIL] - now, 0)
        yield wait + row[P.C0] + row[P.C1] * computed + row[P.C2] * computed * (stored + computed / 2)


def sequences(request: Request, cluster: Cluster) -> Iterable[float]:
    """Sequences decoded at each slot, now or soon; infinite if it cannot serve the request."""
    for slot, row in enumerate(cluster.decode.rows):
        fits = row[D.AVAILABLE] == 1 and not (request.decode_fit and not request.decode_fit[slot])
        yield row[D.SEQUENCES] + row[D.COMING] if fits else inf


def least(scores: Iterable[float]) -> int | None:
    """The first slot with the lowest finite score."""
    score, slot = min(((score, slot) for slot, score in enumerate(scores)), default=(inf, None))
    return slot if score < inf else None


class Policy(Scheduler):
    description = Description("my-scheduler", "0.1.0")

    def schedule(self, now: float, request: Request, cluster: Cluster) -> Decision:
        prefill, decode = least(first_tokens(now, request, cluster)), least(sequences(request, cluster))
        if prefill is None or decode is None:
            return reject(Reason.NO_INSTANCE, 1000)
        return Decision(prefill, decode)

    def explain(self, now: float, request: Request, cluster: Cluster) -> list[float]:
        return list(first_tokens(now, request, cluster))
