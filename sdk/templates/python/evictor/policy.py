"""Evicts the block used longest ago; within one prompt the deepest block first."""

from kvasir import NONE, Description, Event, Evictor, Kind, Order, victim


class Policy(Evictor):
    description = Description("my-lru", "0.1.0")

    def open(self, slots: int) -> None:
        self.order = Order(slots)  # resident blocks, the one used longest ago first
        self.parent = [NONE] * slots
        self.pinned: set[int] = set()

    def on_event(self, event: Event) -> None:
        slot = event.slot
        if event.kind == Kind.INSERT:
            self.parent[slot] = event.parent
        if event.kind == Kind.PIN:
            self.pinned.add(slot)
        elif event.kind not in (Kind.HIT, Kind.KEEP):
            self.pinned.discard(slot)
        if event.kind in (Kind.PIN, Kind.REMOVE):
            self.order.remove(slot)
        elif slot not in self.pinned:
            # To the end; but if the parent stands in the order, in front of it, so that leaves go first.
            self.order.put(slot, self.parent[slot])

    def select_victims(self, now: int, want: int) -> list[int]:
        victims = []
        while len(victims) < want and (slot := self.order.first()) != NONE:
            self.order.remove(slot)
            victims.append(victim(slot))
        return victims
