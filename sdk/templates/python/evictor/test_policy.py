"""python -m unittest: the policy runs as it is, called as a host would. PYTHONPATH must name sdk/python."""

import unittest

import kvasir
from kvasir import NONE, Kind
from policy import Policy

WORDS = 10  # one more than documented, as a later host may send


class EvictorTest(unittest.TestCase):
    def setUp(self):
        _, self.eviction = kvasir.host(Policy())
        self.eviction.open([4, WORDS, 7])

    def event(self, kind, slot, parent=1):
        self.eviction.on_events(0, [kind, slot, parent, 0, 1 << 20, 0, 0, 0, 0, 77])

    def victims(self, want):
        return self.eviction.select_victims(0, want)

    def test_block_used_longest_ago_goes_first_and_leaves_before_parents(self):
        self.assertEqual(self.victims(1), [])
        self.event(Kind.INSERT, 0, NONE)  # a prompt of two blocks, 0 and 1, and another, 2
        self.event(Kind.INSERT, 1, 0)
        self.event(Kind.INSERT, 2, NONE)
        self.event(Kind.HIT, 0)
        self.event(Kind.HIT, 1)
        self.assertEqual(self.victims(1), [2])
        self.event(Kind.KEEP, 2)
        self.assertEqual(self.victims(1), [1])

    def test_pinned_and_removed_blocks_are_no_victims(self):
        self.event(Kind.INSERT, 0, NONE)
        self.event(Kind.PIN, 0)
        self.event(Kind.HIT, 0)
        self.event(99, 3)  # a kind of a later host
        self.event(Kind.INSERT, 3, NONE)
        self.event(Kind.REMOVE, 3)
        self.assertEqual(self.victims(2), [])
        self.event(Kind.UNPIN, 0)
        self.assertEqual(self.victims(2), [0])


if __name__ == "__main__":
    unittest.main()
