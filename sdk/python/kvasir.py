"""Write a Kvasir policy in Python: extend Scheduler, Evictor, Admitter or Balancer as `class Policy` in policy.py.

What each call means stands in the WIT text (sdk/wit). Nothing here needs a component, so tests run it as it is:
`host(policy)` gives the functions that the host calls.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

NONE = 0xFFFF_FFFF
"""No slot, no parent, never."""


class Refused(Exception):
    """A setting or a state that cannot be used; its text goes to the operator."""


@dataclass
class Setting:
    name: str
    default: str
    doc: str


@dataclass
class Description:
    name: str
    version: str
    settings: list[Setting] = field(default_factory=list)
    slot: str = ""


def number(name: str, text: str, low: float, high: float) -> float:
    """A setting's value within `low` to `high`; raises Refused if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise Refused(f"{name}: a number from {low:g} to {high:g}")
    return value


class Base:
    """What a policy of any slot may say and take."""

    description: Description

    def configure(self, name: str, value: str) -> None:
        """Gets every setting once: the operator's value, or the default. May raise Refused."""

    def export_state(self) -> bytes:
        return b""

    def import_state(self, state: bytes) -> None:
        raise Refused("this policy keeps no state")


class Control:
    """`control`, for a policy of any slot."""

    def __init__(self, policy: Base, slot: str):
        self.policy, self.slot = policy, slot

    def describe(self) -> Description:
        d = self.policy.description
        return Description(d.name, d.version, d.settings, self.slot)

    def configure(self, pairs: list[tuple[str, str]]) -> None:
        given, settings = dict(pairs), self.policy.description.settings
        for name in given:
            if not any(s.name == name for s in settings):
                raise Refused(f"unknown setting: {name}")
        for s in settings:
            self.policy.configure(s.name, given.get(s.name, s.default))

    def export_state(self) -> bytes:
        return self.policy.export_state()

    def import_state(self, state: bytes) -> None:
        self.policy.import_state(state)


class P(IntEnum):
    """Columns of `prefill`."""

    AVAILABLE = 1
    BUSY_UNTIL, C0, C1, C2, T0, T1, QUEUED, FREE_BLOCKS, CAPACITY, REPORTED_AT = range(2, 12)
    IDENTITY, PEER, HOST, DOMAIN, WAITING, ADAPTERS, ADAPTERS_MAX, SEND = range(12, 20)


class D(IntEnum):
    """Columns of `decode`."""

    AVAILABLE = 1
    SEQUENCES, CONTEXT, FREE_BLOCKS, CAPACITY, D0, D1, D2, COMING, COMING_CONTEXT, REPORTED_AT = range(2, 12)
    IDENTITY, PEER, HOST, DOMAIN, WAITING, T0, T1, ADAPTERS, ADAPTERS_MAX = range(12, 21)


class Reason(IntEnum):
    """Reasons of a rejection."""

    TTFT, TBT, NO_INSTANCE, NO_MEMORY, OWN = range(1, 6)


@dataclass
class Decision:
    prefill: int
    decode: int = 0
    transfer_blocks: int = 0
    source: int = 0
    reason: int = 0
    retry_after: int = 0
    session_memo: int = 0
    tenant_charge: int = 0


def reject(reason: int, retry_after_ms: int) -> Decision:
    return Decision(NONE, reason=reason, retry_after=retry_after_ms)


class Table:
    """One of the two tables, kept as the host pushes it: `table.rows[slot][P.C0]`."""

    def __init__(self, slots: int = 0, width: int = 0):
        self.slots, self.width = slots, width
        self.rows = [[0.0] * width for _ in range(slots)]

    def update(self, rows: list[float]) -> None:
        for at in range(0, len(rows) - self.width + 1, self.width or 1):
            if 0 <= rows[at] < self.slots:
                self.rows[int(rows[at])] = rows[at : at + self.width]


@dataclass
class Cluster:
    prefill: Table = field(default_factory=Table)
    decode: Table = field(default_factory=Table)
    block_tokens: int = 0
    domains: int = 0
    host_run: int = 0


class Request:
    """Words 0 to 17 by name; columns that the host did not send are None."""

    COLUMNS = (
        "prefix",
        "prefix_hbm",
        "prefix_dram",
        "prefill_fit",
        "decode_prefix",
        "decode_fit",
        "prefill_score",
        "decode_score",
        "decode_prefix_hbm",
        "decode_prefix_dram",
    )
    OF_DECODE = ("decode_prefix", "decode_fit", "decode_score", "decode_prefix_hbm", "decode_prefix_dram")

    def __init__(self, words: list[int]):
        self.prompt_tokens, self.output_tokens, self.klass, self.tenant, self.priority, self.hints = words[:6]
        self.session, self.seed = _u64(words, 6), _u64(words, 8)
        self.ttft_slo, self.tbt_slo = _float(words[10]), _float(words[11])
        self.model, self.adapter = words[12:14]
        self.session_memo, self.tenant_memo = _u64(words, 14), _u64(words, 16)

    def read_columns(self, words: list[int], at: int, prefill_slots: int, decode_slots: int) -> None:
        for bit, name in enumerate(self.COLUMNS):
            slots = decode_slots if name in self.OF_DECODE else prefill_slots
            there = words[18] >> bit & 1
            setattr(self, name, words[at : at + slots] if there else None)
            at += slots if there else 0


class Scheduler(Base):
    def schedule(self, now: float, request: Request, cluster: Cluster) -> Decision:
        raise NotImplementedError

    def explain(self, now: float, request: Request, cluster: Cluster) -> list[float]:
        return []

    def update_links(self, links: list[list[float]]) -> None: ...

    def set_thresholds(self, values: list[float]) -> None: ...


class Scheduling:
    """`scheduling`, as the host calls it."""

    def __init__(self, policy: Scheduler):
        self.policy, self.cluster, self.words, self.link_values = policy, Cluster(), 0, 5
        self.set_thresholds = policy.set_thresholds

    def open(self, layout: list[int]) -> None:
        prefill, decode, tokens, prefill_width, decode_width, self.words, domains, self.link_values = layout[:8]
        run = layout[8] if len(layout) > 8 else 0
        self.cluster = Cluster(Table(prefill, prefill_width), Table(decode, decode_width), tokens, domains, run)

    def update_prefill(self, rows: list[float]) -> None:
        self.cluster.prefill.update(rows)

    def update_decode(self, rows: list[float]) -> None:
        self.cluster.decode.update(rows)

    def update_links(self, rows: list[float]) -> None:
        self.policy.update_links(_split(rows, self.link_values))

    def schedule(self, now: float, question: list[int]) -> Decision:
        return self.policy.schedule(now, self._request(question), self.cluster)

    def explain(self, now: float, question: list[int]) -> list[float]:
        return self.policy.explain(now, self._request(question), self.cluster)

    def _request(self, question: list[int]) -> Request:
        request = Request(question)
        request.read_columns(question, self.words, self.cluster.prefill.slots, self.cluster.decode.slots)
        return request


class Kind(IntEnum):
    INSERT, HIT, REMOVE, KEEP, PIN, UNPIN = range(1, 7)


class Where(IntEnum):
    """Where a victim's bytes go."""

    HOST_DECIDES, HBM, NVME, REMOTE, DROP = 0, 1, 3, 4, 15


@dataclass
class Event:
    kind: int
    replayed: bool
    klass: int
    slot: int
    parent: int
    """Of an insert: the parent's slot, or NONE. Of a hit: how many uses it stands for."""
    depth: int
    size: int
    time: int
    identity: int
    tenant: int


class Evictor(Base):
    def open(self, slots: int) -> None:
        """Empties the policy; block slots are below `slots`."""
        raise NotImplementedError

    def on_event(self, event: Event) -> None:
        """Gets known kinds, and slots below `slots`, only."""
        raise NotImplementedError

    def select_victims(self, now: int, want: int) -> list[int]:
        """Victims as `victim` makes them, most expendable first."""
        raise NotImplementedError

    def update_tiers(self, tiers: list[list[float]]) -> None: ...


def victim(slot: int, where: int = Where.HOST_DECIDES) -> int:
    return slot | where << 28


class Order:
    """Block slots in an order that the policy gives them."""

    def __init__(self, slots: int = 0):
        # Element `slots` is both ends; a slot that stands nowhere follows itself.
        self.slots, self.next, self.prev = slots, list(range(slots + 1)), list(range(slots + 1))

    def __contains__(self, slot: int) -> bool:
        return slot < self.slots and self.next[slot] != slot

    def first(self) -> int:
        slot = self.next[self.slots]
        return NONE if slot == self.slots else slot

    def remove(self, slot: int) -> None:
        after, before = self.next[slot], self.prev[slot]
        self.next[before], self.prev[after] = after, before
        self.next[slot] = self.prev[slot] = slot

    def put(self, slot: int, at: int) -> None:
        """Moves or adds `slot` in front of `at`, or last if `at` is not in the order."""
        if slot == at:
            return
        self.remove(slot)
        at = at if at in self else self.slots
        before = self.prev[at]
        self.next[slot], self.prev[slot] = at, before
        self.next[before] = self.prev[at] = slot


class Eviction:
    """`eviction`, as the host calls it."""

    def __init__(self, policy: Evictor):
        self.policy, self.slots, self.words, self.tier_values = policy, 0, 9, 6
        self.select_victims = policy.select_victims

    def open(self, layout: list[int]) -> None:
        self.slots, self.words, self.tier_values = layout[:3]
        self.policy.open(self.slots)

    def update_tiers(self, rows: list[float]) -> None:
        self.policy.update_tiers(_split(rows, self.tier_values))

    def on_events(self, base: int, events: list[int]) -> None:
        for at in range(0, len(events) - self.words + 1, self.words):
            first, slot, parent, depth, size, after, low, high, tenant = events[at : at + 9]
            if Kind.INSERT <= first & 255 <= Kind.UNPIN and slot < self.slots:
                identity, replayed = low | high << 32, bool(first >> 8 & 1)
                self.policy.on_event(
                    Event(first & 255, replayed, first >> 16, slot, parent, depth, size, base + after, identity, tenant)
                )


class Store(IntEnum):
    """What happens to a block offered to a tier."""

    SKIP, STORE, COLDER = range(3)


class Forecast:
    def __init__(self, values: list[float]):
        self.ttft, self.tbt, self.tenant_part, self.queue_ms, self.prefill_ms, self.transfer_ms = values[:6]
        self.tokens_stored = values[6]


@dataclass
class Block:
    klass: int
    uses: int
    depth: int
    size: int
    last_offered_ms: int
    tenant: int


ACCEPT = 0


def queue(retry_after_ms: int) -> int:
    return 1 | retry_after_ms << 32


def refuse(reason: int, retry_after_ms: int) -> int:
    return 2 | reason << 8 | retry_after_ms << 32


class Admitter(Base):
    def admit_request(self, request: Request, forecast: Forecast) -> int:
        """ACCEPT, or what `queue` or `refuse` return."""
        raise NotImplementedError

    def admit_block(self, tier: int, block: Block) -> int:
        raise NotImplementedError

    def update_load(self, values: list[float]) -> None: ...


class Admission:
    """`admission`, as the host calls it."""

    def __init__(self, policy: Admitter):
        self.policy, self.update_load = policy, policy.update_load

    def admit_request(self, request: list[int], forecast: list[float]) -> int:
        return self.policy.admit_request(Request(request), Forecast(forecast))

    def admit_blocks(self, tier: int, stride: int, blocks: list[int]) -> list[int]:
        records = (blocks[at : at + 5] for at in range(0, len(blocks), stride))
        return [self.policy.admit_block(tier, Block(w[0] & 0xFFFF, w[0] >> 16, *w[1:])) for w in records]


@dataclass
class Tick:
    now: int
    hit_percent: float
    rejected: float
    accepted: float
    prefill_queue: list[float]
    decode_step: list[float]


class Balancer(Base):
    def tick(self, tick: Tick) -> list[float]:
        """The thresholds to have from now on; none = keep."""
        raise NotImplementedError


class Balancing:
    """`balancing`, as the host calls it."""

    def __init__(self, policy: Balancer):
        self.policy = policy

    def tick(self, now: int, cluster: list[float], prefill_queue: list[float], decode_step: list[float]) -> list[float]:
        return self.policy.tick(Tick(now, *cluster[:3], prefill_queue, decode_step))


class End(IntEnum):
    """How a request ended."""

    FINISHED, REJECTED, REFUSED, GIVEN_UP = range(1, 5)


class Outcome:
    """What came of a request; times in ms, -1 = not known."""

    def __init__(self, words: list[int]):
        self.end, self.reason, self.decision, self.session = words[0], words[1], _u64(words, 2), _u64(words, 8)
        self.tenant, self.klass, self.model, self.adapter = words[4:8]
        self.prefill, self.decode, self.prompt_tokens, self.cached_tokens = words[10:14]
        self.fetched_blocks, self.decoded_tokens = words[14:16]
        self.ttft_predicted, self.ttft, self.tbt_predicted, self.tbt = map(_float, words[16:20])
        self.queue_predicted, self.prefill_predicted = map(_float, words[20:22])
        self.prefill_measured = _float(words[22]) if len(words) > 22 else -1.0
        self.host_run = words[23] if len(words) > 23 else 0


class Learner:
    """Extended beside Scheduler or Admitter by a policy that learns: `class Policy(Scheduler, Learner)`."""

    def observe(self, outcome: Outcome) -> None:
        """Gets each outcome with a known end, on the learner's instance alone."""
        raise NotImplementedError

    def publish(self) -> bytes:
        """What instances that decide are to know, in a format of the policy's own."""
        raise NotImplementedError

    def adopt(self, knowledge: bytes) -> None:
        """Takes what the learner published."""
        raise NotImplementedError


class Learning:
    """`learning`, as the host calls it."""

    def __init__(self, policy: Learner):
        self.policy, self.publish, self.adopt = policy, policy.publish, policy.adopt

    def observe(self, stride: int, outcomes: list[int]) -> None:
        for at in range(0, len(outcomes) - stride + 1, stride):
            if End.FINISHED <= outcomes[at] <= End.GIVEN_UP:
                self.policy.observe(Outcome(outcomes[at : at + stride]))


_SLOTS = (
    (Scheduler, "scheduler", Scheduling),
    (Evictor, "evictor", Eviction),
    (Admitter, "admitter", Admission),
    (Balancer, "balancer", Balancing),
)


def host(policy: Base):
    """The interfaces of a policy, as the host calls them: `control`, that of its slot, and `learning` if it learns."""
    for kind, slot, interface in _SLOTS:
        if isinstance(policy, kind):
            learning = (Learning(policy),) if isinstance(policy, Learner) else ()
            return Control(policy, slot), interface(policy), *learning
    raise TypeError("class Policy extends none of Scheduler, Evictor, Admitter, Balancer")


def _split(values: list[float], width: int) -> list[list[float]]:
    return [values[at : at + width] for at in range(0, len(values), width)]


def _u64(words: list[int], at: int) -> int:
    return words[at] | words[at + 1] << 32


def _float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]
