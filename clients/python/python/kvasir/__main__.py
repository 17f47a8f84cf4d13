"""Commands for people: ``python -m kvasir doctor`` and ``python -m kvasir explain``."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
from typing import Any

from kvasir.doctor import examine


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all is well, or nothing differs; 1 it is not; 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m kvasir", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="can the host be reached, and which engines are here")
    doctor.add_argument(
        "--host",
        default=os.environ.get("KVASIR_HOST") or _usual_socket(),
        help="unix:/path or tcp://host:port; default: KVASIR_HOST, or where a host of this user listens: %(default)s",
    )
    doctor.add_argument("--token-file", type=pathlib.Path, help="file with a token, for TCP; default: KVASIR_TOKEN")
    explain = commands.add_parser("explain", help="why two namespaces share no blocks")
    explain.add_argument("a", help="a JSON file of a namespace, or a digest in hexadecimal")
    explain.add_argument("b", help="the other one")
    options = parser.parse_args(arguments)
    return _doctor(options) if options.command == "doctor" else _explain(parser, options.a, options.b)


def _usual_socket() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return f"unix:{state}/kvasir/kvasir.sock"


def _doctor(options: argparse.Namespace) -> int:
    token = os.environ.get("KVASIR_TOKEN", "")
    if options.token_file is not None:
        token = options.token_file.read_text().strip()
    all_good = True
    for finding in examine(options.host, token):
        all_good &= finding.good
        print("ok  " if finding.good else "BAD ", finding.text)
    return 0 if all_good else 1


def _explain(parser: argparse.ArgumentParser, a: str, b: str) -> int:
    from kvasir import namespace

    sides = [_side(parser, text) for text in (a, b)]
    first, second = sides
    if isinstance(first, dict) and isinstance(second, dict):
        lines = namespace.explain(first, second)
    else:
        digests = [side if isinstance(side, bytes) else namespace.digest(side) for side in sides]
        lines = []
        if digests[0] != digests[1]:
            lines = [f"digest: {digests[0].hex()} != {digests[1].hex()}; give the JSON of both to see which field"]
    print("\n".join(lines) if lines else "the same namespace: these two share their blocks")
    return 1 if lines else 0


def _side(parser: argparse.ArgumentParser, text: str) -> dict[str, Any] | bytes:
    if re.fullmatch("[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    try:
        fields = json.loads(pathlib.Path(text).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{text}: {error}; give a JSON file, or a digest of 64 hexadecimal digits")
    if not isinstance(fields, dict):
        parser.error(f"{text}: a namespace is a JSON object")
    return fields


if __name__ == "__main__":
    sys.exit(main())
