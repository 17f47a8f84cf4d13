"""Kvasir below SGLang's HiCache: pages go from SGLang's host memory to the host daemon and back.

Named in `--hicache-storage-backend-extra-config`; see `docs/engines/sglang.md`.
"""

from kvasir.sglang.storage import KvasirStorage

__all__ = ["KvasirStorage"]
