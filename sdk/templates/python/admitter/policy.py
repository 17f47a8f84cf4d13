"""Refuses a request whose predicted times miss its SLO, and stores blocks that were used often enough."""

from kvasir import ACCEPT, Admitter, Block, Description, Forecast, Reason, Request, Setting, Store, number, refuse


class Policy(Admitter):
    description = Description(
        "my-admitter",
        "0.1.0",
        [
            Setting("slack", "1", "times its SLO that a predicted time may reach, 0.1 to 100"),
            Setting("min-uses", "2", "uses a block must have had to be stored in a lower tier, 0 to 1000"),
        ],
    )

    def configure(self, name: str, value: str) -> None:
        if name == "slack":
            self.slack = number(name, value, 0.1, 100)
        else:
            self.min_uses = number(name, value, 0, 1000)

    def admit_request(self, request: Request, forecast: Forecast) -> int:
        if request.hints & 1:  # it must run
            return ACCEPT
        if forecast.ttft > self.slack * request.ttft_slo:
            return refuse(Reason.TTFT, 1000)
        if forecast.tbt > self.slack * request.tbt_slo:
            return refuse(Reason.TBT, 1000)
        return ACCEPT

    def admit_block(self, tier: int, block: Block) -> int:
        return Store.STORE if block.uses >= self.min_uses else Store.SKIP
