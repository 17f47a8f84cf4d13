"""python -m unittest: the policy runs as it is, called as a host would. PYTHONPATH must name sdk/python."""

import unittest

import kvasir
from kvasir import Refused
from policy import Policy


class BalancerTest(unittest.TestCase):
    def setUp(self):
        self.control, self.balancing = kvasir.host(Policy())

    def tick(self, *queues):
        return self.balancing.tick(0, [0.0, 0.0, 0.0], list(queues), [0.0])

    def test_uneven_queues_are_answered(self):
        self.control.configure([("even", "8")])
        self.assertEqual(self.tick(10, 10, 10), [8])
        self.assertEqual(self.tick(1, 1, 100), [1.5])
        self.assertEqual(self.tick(5, 20, -1), [8])  # 20 is less than twice 12.5
        self.assertEqual(self.tick(-1, -1, -1), [])

    def test_settings_are_checked(self):
        for name, value in [("even", "0.5"), ("uneven", ""), ("odd", "1")]:
            with self.assertRaisesRegex(Refused, name):
                self.control.configure([(name, value)])


if __name__ == "__main__":
    unittest.main()
