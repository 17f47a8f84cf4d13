"""Fixtures where the engine is installed; where it is not, each file of tests says so and is skipped."""

import importlib.util

# Not the name alone: this folder has it too.
if importlib.util.find_spec("sglang.srt"):
    from sglang_fixtures import extra, group, small_machine, start_engine

    __all__ = ["extra", "group", "small_machine", "start_engine"]
