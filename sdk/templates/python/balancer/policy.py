"""Lets the scheduler move prefixes sooner while queues are uneven."""

from kvasir import Balancer, Description, Setting, Tick, number


class Policy(Balancer):
    description = Description(
        "my-balancer",
        "0.1.0",
        [
            Setting("even", "4", "kvcache-balancing-threshold while queues are even, 1 to 1000"),
            Setting("uneven", "1.5", "the same while the longest queue is over twice the mean, 1 to 1000"),
        ],
    )

    def __init__(self) -> None:
        self.threshold: dict[str, float] = {}

    def configure(self, name: str, value: str) -> None:
        self.threshold[name] = number(name, value, 1, 1000)

    def tick(self, tick: Tick) -> list[float]:
        queues = [queue for queue in tick.prefill_queue if queue >= 0]  # the others are unavailable
        if not queues:
            return []  # keep what is in force
        uneven = max(queues) > 2 * sum(queues) / len(queues)
        return [self.threshold["uneven" if uneven else "even"]]
