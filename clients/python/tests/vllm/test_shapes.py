"""Other models and more than one worker, each in a real engine with processes of its own."""

import os

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")

import tiny
from engine import prompt

ALL = 192


@pytest.mark.parametrize("shape", ["sliding window", "two ranks", "two ranks with the same heads"])
def test_a_hit_is_equal(elsewhere, settings, folder, shape):
    if shape == "sliding window":
        job = {"model": tiny.write_hybrid(folder / "hybrid"), "blocks": 48}
    else:
        heads = 4 if shape == "two ranks" else 2
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("two workers want two cores")
        # vLLM gives each worker a NUMA node of its own, unless it is told which cores.
        bind = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        job = {"model": tiny.write(folder / f"heads-{heads}", heads=heads), "more": ranks, "environment": bind}
    right = elsewhere([prompt(1)], None, **job)[0]
    cold, hit = elsewhere([prompt(1)], settings, twice=True, **job)
    assert (cold["cached"], hit["cached"]) == (0, ALL)
    for answer in (cold, hit):
        assert (answer["tokens"], answer["logprobs"]) == (right["tokens"], right["logprobs"])
