"""python -m unittest: the policy runs as it is, called as a host would. PYTHONPATH must name sdk/python."""

import struct
import unittest

import kvasir
from kvasir import ACCEPT, Reason, Refused, Store, refuse
from policy import Policy


def bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


class AdmitterTest(unittest.TestCase):
    def setUp(self):
        self.control, self.admission = kvasir.host(Policy())

    def admit(self, ttft, tbt, hints=0):
        request = [0] * 5 + [hints] + [0] * 4 + [bits(200), bits(50)] + [0] * 6
        return self.admission.admit_request(request, [ttft, tbt, 0, 0, 0, 0, 0])

    def test_what_misses_its_slo_is_refused(self):
        self.control.configure([])
        self.assertEqual(self.admit(200, 50), ACCEPT)
        self.assertEqual(self.admit(201, 50), refuse(Reason.TTFT, 1000))
        self.assertEqual(self.admit(200, 51), refuse(Reason.TBT, 1000))
        self.assertEqual(self.admit(201, 51, hints=1), ACCEPT)
        self.control.configure([("slack", "1.5")])
        self.assertEqual(self.admit(300, 75), ACCEPT)

    def test_blocks_used_often_enough_are_stored(self):
        self.control.configure([("min-uses", "3")])
        blocks = [2 << 16, 0, 1, 0, 0, 77, 3 << 16, 0, 1, 0, 0, 77]  # records of 6 words
        self.assertEqual(self.admission.admit_blocks(3, 6, blocks), [Store.SKIP, Store.STORE])

    def test_settings_are_checked(self):
        for name, value in [("slack", "x"), ("slack", "0"), ("min-uses", "-1"), ("slak", "1")]:
            with self.assertRaisesRegex(Refused, name):
                self.control.configure([(name, value)])


if __name__ == "__main__":
    unittest.main()
