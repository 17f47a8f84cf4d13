"""python -m unittest: the policy runs as it is, called as a host would. PYTHONPATH must name sdk/python."""

import unittest

import kvasir
from kvasir import Decision, Reason, reject
from policy import Policy

PREFILL, DECODE, WORDS = 20, 22, 20  # one more than documented each, as a later host may send


class SchedulerTest(unittest.TestCase):
    def setUp(self):
        _, self.scheduling = kvasir.host(Policy())
        self.scheduling.open([2, 2, 16, PREFILL, DECODE, WORDS, 1, 6, 7, 99])

    def prefill(self, *values):
        self.scheduling.update_prefill([float(v) for v in (*values, 10, 0.1, *[0] * PREFILL)][:PREFILL])

    def decode(self, *values):
        self.scheduling.update_decode([float(v) for v in (*values, *[0] * DECODE)][:DECODE])

    def schedule(self, *columns):
        """1,000 tokens; columns 0 (prefix) and 3 (which prefill can serve it)."""
        return self.scheduling.schedule(50.0, [1000, *[0] * 17, 0b1001, 0, *columns])

    def test_goes_where_the_first_token_comes_soonest(self):
        self.assertEqual(self.schedule(0, 0, 1, 1), reject(Reason.NO_INSTANCE, 1000))
        self.prefill(0, 1, 0)
        self.prefill(1, 1, 100)
        self.decode(0, 1, 5)
        self.decode(1, 1, 4)
        self.assertEqual(self.schedule(0, 0, 1, 1), Decision(0, 1))
        self.assertEqual(self.schedule(0, 50, 1, 1), Decision(1, 1))  # 80 ms of prefill saved, 50 of waiting
        self.assertEqual(self.schedule(0, 50, 1, 0), Decision(0, 1))  # 1 cannot serve it
        self.decode(1, 0, 4)
        self.assertEqual(self.schedule(0, 0, 1, 1), Decision(0, 0))
        self.assertEqual(self.scheduling.explain(50.0, [1000, *[0] * 19]), [110, 160])


if __name__ == "__main__":
    unittest.main()
