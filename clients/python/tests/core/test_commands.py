"""`python -m kvasir`."""

import json
import pathlib

import pytest
from daemon import Host

from kvasir.__main__ import main


def test_doctor_says_whether_the_host_works(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--host", host.unix])
    said = capsys.readouterr().out
    assert "reached" in said and "stored and loaded" in said
    host.stop()
    assert main(["doctor", "--host", host.unix]) == 1
    assert "BAD  host unix:" in capsys.readouterr().out
    assert main(["doctor", "--host", "nonsense"]) == 1
    assert "is not an endpoint" in capsys.readouterr().out


def test_doctor_shows_a_token(
    host: Host, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVASIR_TOKEN", raising=False)
    assert main(["doctor", "--host", host.tcp]) == 1
    file = tmp_path / "token"
    file.write_text(host.token() + "\n")
    capsys.readouterr()
    main(["doctor", "--host", host.tcp, "--token-file", str(file)])
    said = capsys.readouterr().out
    assert "blocks go over TCP" in said and "removing is not allowed" in said


def test_explain_says_which_field_differs(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace = pytest.importorskip("kvasir.namespace")
    fields = {"schema": 1, "engine": "vllm", "model": "m", "tp": {"size": 2}}
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(fields))
    b.write_text(json.dumps(fields))
    assert main(["explain", str(a), str(b)]) == 0
    assert main(["explain", str(a), namespace.digest(fields).hex()]) == 0
    assert "share their blocks" in capsys.readouterr().out
    b.write_text(json.dumps({**fields, "tp": {"size": 4}}))
    assert main(["explain", str(a), str(b)]) == 1
    assert "tp.size" in capsys.readouterr().out
    assert main(["explain", str(b), namespace.digest(fields).hex()]) == 1
    for wrong in ("missing.json", "0123"):
        with pytest.raises(SystemExit) as ended:
            main(["explain", str(a), wrong])
        assert ended.value.code == 2
