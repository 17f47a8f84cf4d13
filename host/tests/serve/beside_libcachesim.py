"""Hits of Kvasir's evictors beside libcachesim's, on a trace in which every block is a request of its own.

python beside_libcachesim.py KVASIR TRACE

Without chains both count alike, so `lru`, `fifo`, `lfu` and `sieve` have the same hits to the last. Two differ by what they know:

* `arc` chooses a victim before it hears which block takes the place, so its target moves one block later;
* `optimum` may pass by a block that is not worth a place, Belady's algorithm takes in every one.
"""

import gzip
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import libcachesim

EXACT = {"lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "sieve": "Sieve"}
NEAR = {"arc": "ARC", "optimum": "Belady"}
# Parts of the blocks that the trace has.
CAPACITIES = [0.02, 0.1, 0.4]
# The most that may lie between those that differ, in per cent of all blocks.
NEAR_PERCENT = 0.1


def blocks_of(trace):
    opens = gzip.open if trace.suffix == ".gz" else open
    with opens(trace, "rt") as lines:
        return [block for line in lines for block in json.loads(line)["hash_ids"]]


def flatten(blocks, folder):
    """The trace for Kvasir, and for libcachesim with the place of the next use, or -1."""
    ours, theirs = folder / "flat.jsonl", folder / "flat.oracle"
    with ours.open("w") as file:
        for time, block in enumerate(blocks):
            row = {"timestamp": time, "input_length": 512, "output_length": 1, "hash_ids": [block]}
            file.write(json.dumps(row) + "\n")
    following, next_use = {}, [-1] * len(blocks)
    for time in range(len(blocks) - 1, -1, -1):
        next_use[time] = following.get(blocks[time], -1)
        following[blocks[time]] = time
    with theirs.open("wb") as file:
        for time, block in enumerate(blocks):
            file.write(struct.pack("<IQIq", time, block + 1, 1, next_use[time]))
    return ours, theirs


def kvasir_hits(kvasir, trace, capacities):
    evictors, rooms = ",".join([*EXACT, *NEAR]), ",".join(map(str, capacities))
    command = [kvasir, "replay", "--mode", "cache", "--trace", trace, "--json"]
    command += ["--evictor", evictors, "--capacity-blocks", rooms]
    rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["rows"]
    return {(row["evictor"], row["capacity_blocks"]): row["prefix_hits"] for row in rows}


def libcachesim_hits(name, trace, capacity, blocks):
    reader = libcachesim.TraceReader(
        trace=str(trace),
        trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE,
        reader_init_params=libcachesim.ReaderInitParam(ignore_obj_size=True),
    )
    miss_ratio, _ = getattr(libcachesim, name)(capacity).process_trace(reader)
    return round((1 - miss_ratio) * blocks)


def main(kvasir, trace):
    blocks = blocks_of(trace)
    capacities = [max(1, int(len(set(blocks)) * part)) for part in CAPACITIES]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = flatten(blocks, Path(folder))
        hits = kvasir_hits(kvasir, ours, capacities)
        for evictor, name in (EXACT | NEAR).items():
            for capacity in capacities:
                here = hits[evictor, capacity]
                there = libcachesim_hits(name, theirs, capacity, len(blocks))
                percent = [round(100 * n / len(blocks), 4) for n in (here, there)]
                print(f"{trace.name:24} {evictor:8} {capacity:6} {percent[0]:8.4f} {percent[1]:8.4f}")
                near = NEAR_PERCENT if evictor in NEAR else 0
                if abs(percent[0] - percent[1]) > near or (evictor == "optimum" and here < there):
                    wrong.append(f"{evictor} with {capacity} blocks: {here} hits, {name} has {there}")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
