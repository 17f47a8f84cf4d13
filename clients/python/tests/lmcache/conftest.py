"""Fixtures where the engine is installed; where it is not, each file of tests says so and is skipped."""

import importlib.util

# Not the name alone: this folder has it too.
if importlib.util.find_spec("lmcache.v1"):
    from lmcache_fixtures import chunks, start

    __all__ = ["chunks", "start"]
