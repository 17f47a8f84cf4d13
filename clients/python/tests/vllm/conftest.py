"""Fixtures of the vLLM tests. Without vLLM or a host's program the tests are skipped, and say so."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import host as hosts


@pytest.fixture(scope="session")
def folder():
    """A short path, as the path of a Unix socket may have some 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield pathlib.Path(name)


def _started(folder, **settings):
    if hosts.binary() is None:
        pytest.skip("no kvasir program; build it, or set KVASIR_BIN")
    folder.mkdir(exist_ok=True)
    return hosts.Host(folder, **settings).start()


@pytest.fixture(scope="module")
def host(folder, request):
    """A host for the tests of a file."""
    one = _started(folder / request.module.__name__)
    yield one
    one.kill()


@pytest.fixture(scope="session")
def model(folder):
    pytest.importorskip("vllm.v1", reason="vLLM is not installed: see clients/python/tests/vllm/install.sh")
    import tiny

    return tiny.write(folder / "tiny")


@pytest.fixture(scope="session")
def elsewhere(model):
    """Generates in another engine, in a process of its own, with or without the connector."""

    def run(prompts, extra=None, environment=None, **more):
        job = json.dumps({"model": model, "extra": extra, "prompts": prompts} | more)
        known = os.environ | (environment or {})
        script = pathlib.Path(__file__).with_name("engine.py")
        done = subprocess.run(
            [sys.executable, script], input=job, capture_output=True, text=True, timeout=500, env=known
        )
        assert done.returncode == 0, done.stderr[-4000:]
        # Among what vLLM's processes write, also after it.
        return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith('[{"'))

    return run


@pytest.fixture
def settings(host, request):
    """Settings with a namespace of the test's own, so that no test finds another's blocks.

    Saves may hold every block, and questions wait long: this machine may be busy, and a miss would be no fault.
    """
    return {
        "host": host.address,
        "model_id": request.node.name,
        "save_share": 1.0,
        "match_ms": 5000,
        "load_ms": 2000,
        "save_ms": 3000,
    }
