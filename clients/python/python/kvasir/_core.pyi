"""What the package does natively: connections to one host, copying threads, labels.

Bytes in, bytes out, integers little-endian. Every call that can wait gives the GIL away while it does, and any thread may call
anything. Behind every block stands its label: namespace, engine hash and length in full, which are compared after each load,
so that whatever lies under a key, only the block that was asked for is there.
"""

from typing import Final, final

from typing_extensions import Buffer  # collections.abc has it from 3.12 on

__all__ = ["LABEL_BYTES", "PROTOCOL", "Core", "Error", "Mismatch", "Refused", "Unavailable"]

LABEL_BYTES: Final[int]
"""How many bytes larger than its payload a stored block is."""

PROTOCOL: Final[str]
"""The versions of the data protocol that this speaks, for people."""

class Error(Exception):
    """Something failed between this process and its host."""

class Unavailable(Error):
    """The host cannot be asked now. What is stored there counts as missing."""

class Refused(Unavailable):
    """The host was asked and refuses: rights, versions, room."""

class Mismatch(Error):
    """What is stored under this key is not what was asked for."""

@final
class Core:
    """One host.

    It connects when it is first asked something, and again after a failure. A child of a fork makes its own; all calls of one
    that was made before raise ``RuntimeError``. Closed at exit by itself.
    """

    def __new__(
        cls,
        host: str,
        *,
        token: str = "",
        tenant: int = 0,
        load_threads: int = 8,
        save_threads: int = 2,
        match_ms: int = 20,
        load_ms: int = 2000,
        save_ms: int = 30000,
        verify: bool = True,
        workload_class: int = 0,
    ) -> Core:
        """``host`` is ``unix:/path`` or ``tcp://host:port``.

        The times are how long a question, a load and a save may take, the latter two from when they are given. Without
        ``verify`` checksums are not compared; labels are. Raises ``ValueError`` for what makes no sense.
        """

    def plan(
        self, namespace: bytes, runs: bytes, blocks: int, owner: object = None, *, device: int | None = None
    ) -> int:
        """Registers where ``blocks`` blocks lie, and returns the number of the plan.

        ``runs`` are triples (address, length, stride) of u64: block ``b`` has the ``length`` bytes at
        ``address + b * stride``, of one run after the other. ``namespace`` is a digest of 32 B. ``owner`` is kept alive as long
        as the plan, and with it the memory must stay where it is.

        ``device``: the runs lie in the memory of this GPU, by PyTorch's number. Raises ``Error`` if there is none, or if a run
        does not begin and end in its memory. On the host's own machine blocks then go straight between the GPU and the
        host's pool, which the first job registers with the driver; see ``unregistered``.
        """

    def unplan(self, plan: int) -> None:
        """Forgets a plan. Raises ``RuntimeError`` while jobs of it are not drained."""

    def prefix(self, namespaces: list[bytes], hashes: bytes, hash_bytes: int) -> int:
        """How many blocks from the first on are there under every namespace.

        Waits at most ``match_ms``. Raises ``Unavailable``; after that it does so at once for a while, 50 ms to 1 s, and then
        tries the host again.
        """

    def exists(self, namespace: bytes, hashes: bytes, hash_bytes: int) -> bytes:
        """A byte for each block, 1 if it is there. Waits and raises as ``prefix`` does."""

    def tiers(self, namespace: bytes, hashes: bytes, hash_bytes: int) -> bytes:
        """A byte for each block, which says where a load would find it now: 0 nowhere, 1 the host's pool, 2 a GPU of the host,
        3 a disk of the host, 4 another host or a shared store. No promise. Waits and raises as ``prefix`` does."""

    def removals(self, since: int) -> tuple[int, bool, list[bytes]]:
        """Which blocks of this tenant have left the host (evicted from its last tier, removed, expired, damaged): a page.

        Returns where to go on, which is ``since`` when there are no more; whether something was missed, so that nothing that
        is remembered of the host's blocks holds any more; and the blocks' ``keys``. Begin with 0, which misses everything.
        Positions are of one run of the host. Waits and raises as ``prefix`` does, also where the host is of a release
        that does not know.
        """

    @staticmethod
    def keys(namespace: bytes, hashes: bytes, hash_bytes: int) -> list[bytes]:
        """The 16 bytes by which ``removals`` calls each block."""

    def hold(self, namespaces: list[bytes], hashes: bytes, hash_bytes: int, ms: int) -> None:
        """Asks the host not to evict these blocks for ``ms`` ms, or as long as it is connected. Best effort: never raises
        because of the host."""

    def load(
        self, job: int, plan: int, hashes: bytes, hash_bytes: int, blocks: bytes, *, stream: int = 0
    ) -> None:
        """Gives a job: fills block ``blocks[i]`` (u32) of the plan with what is stored under hash ``i``.

        ``drain`` reports it once, after copying has stopped; until then the blocks are the job's. Raises ``ValueError`` for a
        block outside of the plan, ``KeyError`` for no plan, ``Error`` if it is closed; such a job is not reported.

        Of a plan of a GPU, ``stream`` is the driver's handle of the engine's stream: what was given to it before this call is
        done before a block is touched. Nothing that uses the blocks may be given to the GPU until the job is drained.
        """

    def save(
        self, job: int, plan: int, hashes: bytes, hash_bytes: int, blocks: bytes, *, stream: int = 0
    ) -> None:
        """Gives a job: stores block ``blocks[i]`` of the plan under hash ``i``. The rest is as for ``load``."""

    def load_into(self, job: int, namespace: bytes, keys: list[bytes], buffers: list[Buffer]) -> None:
        """``load`` into writable, contiguous buffers, one a key, each exactly as long as the block that will come.

        They are kept until the job is drained. Raises ``BufferError`` for a buffer that cannot be used.
        """

    def save_from(self, job: int, namespace: bytes, keys: list[bytes], buffers: list[Buffer]) -> None:
        """``save`` from contiguous buffers, one a key, of any lengths."""

    def hand_over(
        self,
        job: int,
        plan: int,
        peer: str,
        transfer: bytes,
        part: int,
        hashes: bytes,
        hash_bytes: int,
        blocks: bytes,
        layers: int,
    ) -> None:
        """Gives a job: hands a part of a prompt to the engine that is next to the host called ``peer``, layer by layer.

        ``transfer`` is what both engines call the prompt, 1 to 256 B. The part is block ``blocks[i]`` (u32) of the plan for hash
        ``i``; ``part`` says which block of the prompt is the first of it, counted from 0. The parts of a prompt follow each
        other, from 0 on, without a gap. The plan's runs are ``layers`` groups, a group a layer, of equally many runs and bytes.
        Nothing is sent before ``layer_ready`` is called.

        ``drain`` reports it as a save, once the other host has all of it and has compared the checksums: at most ``save_ms``
        after this, and half of the host's ``store.reservation_ttl``. Raises as ``load`` does; also ``ValueError`` for runs that
        are no such layers, or a job with this number that is not drained. Needs the host's Unix socket, and hosts that know
        each other.
        """

    def layer_ready(self, job: int, layer: int) -> bool:
        """Says that a layer's bytes are final, in all blocks of a ``hand_over``. Layers come in any order.

        They are copied and sent by a thread of this; the bytes must not change until the job is drained. Never waits. False
        if it is no news: no such job or layer, the layer was ready before, or the job has failed.
        """

    def abandon(self, job: int) -> bool:
        """Gives a ``hand_over`` or ``arrive`` up. ``drain`` reports it as failed when copying has stopped, or as what it came
        to before this. Returns False if there is no such job, or it has ended."""

    def arrive(
        self,
        job: int,
        plan: int,
        transfer: bytes,
        hashes: bytes,
        hash_bytes: int,
        first: int,
        blocks: bytes,
        layers: int,
        ms: int,
    ) -> None:
        """Gives a job: receives a prompt that another engine hands over to this host, before or after it begins to.

        ``hashes`` are those of all blocks that are handed over, in all parts. The first ``first`` of them are not wanted; hash
        ``first + i`` belongs into block ``blocks[i]`` (u32) of the plan. Waits for the parts in a thread of this, at most
        ``ms`` in total, and copies each layer as it comes.

        ``drain`` reports it as a load, once all of it was compared with the sender's checksums. A job that failed has no block
        here, whatever was copied. Raises as ``hand_over`` does.
        """

    def drain(self) -> list[tuple[int, bool, bytes, int, str | None]]:
        """Jobs that have ended since the last call, never waiting.

        Of each: its number; whether all its blocks are there; a byte for each block, 1 if it is there, whole and right (of a
        save: stored, or being stored by somebody else); bytes copied; the first failure other than that a block is not there.
        """

    def event_fd(self) -> int:
        """An eventfd that is readable while there is something to drain. Wait for it; do not read or close it.

        Whoever wants to wake the waiting thread writes 8 bytes to it.
        """

    def remove(self, namespace: bytes, keys: list[bytes]) -> bytes:
        """Removes blocks. A byte for each, 1 if it was there. Waits at most ``load_ms``."""

    def sizes(self, namespace: bytes, keys: list[bytes]) -> list[int | None]:
        """Bytes of the payload of each block, or None. Waits at most ``load_ms``."""

    def put(self, namespace: bytes, key: bytes, buffer: Buffer) -> bool:
        """Stores one buffer and waits for it, at most ``load_ms``. Returns False if the block was there already."""

    def get(self, namespace: bytes, key: bytes, buffer: Buffer) -> bool:
        """Fills one buffer and waits for it, at most ``load_ms``. Returns False if there is no such block.

        Raises ``Mismatch`` if what is there has another size or another label.
        """

    def boot(self) -> int:
        """A number of the host's run, 0 before the first connection. With another one, what was remembered is void."""

    def counters(self) -> dict[str, int]:
        """What has happened so far: connections, failures, jobs, blocks and bytes."""

    def unregistered(self) -> str | None:
        """Why the host's pool could not be registered with a GPU's driver, or None: then blocks take a copy more."""

    def close(self) -> None:
        """Takes no more jobs, hangs up, and waits until copying has stopped. What is left is reported as failed by ``drain``."""
