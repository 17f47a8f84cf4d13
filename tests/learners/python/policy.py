"""See ../README.md."""

from kvasir import Admitter, Block, Description, Forecast, Learner, Outcome, Reason, Request, Store, refuse


class Policy(Admitter, Learner):
    description = Description("my-learner", "0.1.0")
    known = 0

    def observe(self, outcome: Outcome) -> None:
        o = outcome
        times = [o.ttft_predicted, o.ttft, o.tbt_predicted, o.tbt, o.queue_predicted, o.prefill_predicted, o.prefill_measured]
        values = [o.end, o.reason, o.decision >> 20, o.tenant, o.klass, o.model, o.adapter, o.session >> 20, o.prefill, o.decode]
        values += [o.prompt_tokens, o.cached_tokens, o.fetched_blocks, o.decoded_tokens]
        for value in [*values, *(int(2 * ms) for ms in times), o.host_run]:
            self.known = (self.known * 31 + value) & 0xFFFFF

    def publish(self) -> bytes:
        return self.known.to_bytes(4, "little")

    def adopt(self, knowledge: bytes) -> None:
        if len(knowledge) == 4:
            self.known = int.from_bytes(knowledge, "little")

    def admit_request(self, request: Request, forecast: Forecast) -> int:
        return refuse(Reason.OWN, self.known)

    def admit_block(self, tier: int, block: Block) -> int:
        return Store.STORE
