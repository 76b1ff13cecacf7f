"""Files read once from the shared disk and sent to every node by MPI, as one stream of tar."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from bagent.errors import MissingPackage, WriteError
from bagent.hpc.stage import Target, is_staged, stage, target_of, target_parser, vouch

CHUNK = 64 * 1024 * 1024
"""Bytes in one broadcast: enough to fill the network, little enough for every node's memory."""


class Comm(Protocol):
    """What is used of an mpi4py communicator."""

    def Get_rank(self) -> int:
        """The number of this process."""
        ...

    def bcast(self, value: Any, root: int = 0) -> Any:
        """The value of process ``root``, in all processes."""
        ...

    def allgather(self, value: Any) -> list[Any]:
        """The values of all processes, in all processes."""
        ...


def received(comm: Comm, sources: Sequence[Path], chunk: int = CHUNK) -> Iterator[bytes]:
    """The tar stream of ``sources`` in every process; only process 0 reads them.

    Raises:
        WriteError: process 0 could not read them; raised in all processes.
    """
    tar = None
    if comm.Get_rank() == 0:
        words = [word for s in sources for word in ("-C", str(s.parent), s.name)]
        tar = subprocess.Popen(["tar", "-chf", "-", *words], stdout=subprocess.PIPE)
        assert tar.stdout is not None
    while True:
        piece = tar.stdout.read(chunk) if tar is not None and tar.stdout is not None else None
        piece = comm.bcast(piece)
        if not piece:
            break
        yield piece
    code = None
    if tar is not None:
        if tar.stdout is not None:
            tar.stdout.close()
        code = tar.wait()
    code = comm.bcast(code)
    if code:
        raise WriteError(f"tar ended with exit code {code} while reading what is staged")


def unpack(pieces: Iterator[bytes], folder: Path) -> None:
    """Unpack a tar stream into ``folder``.

    All pieces are taken even where the disk refuses: the others wait for each of them.

    Raises:
        OSError: the stream could not be unpacked.
    """
    broken = False
    with subprocess.Popen(["tar", "-xf", "-", "-C", str(folder)], stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        for piece in pieces:
            try:
                if not broken:
                    tar.stdin.write(piece)
            except OSError:
                broken = True
    if tar.returncode or broken:
        raise OSError("tar could not unpack all of it")


def broadcast_step(argv: list[str]) -> int:
    """Bring paths to the disks of all nodes of an MPI launch, one process a node."""
    given = target_parser("broadcast").parse_args(argv)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingPackage(
            f"stage_by: mpi needs mpi4py and the MPI library of the machine: {error}",
            hint="pip install 'mpi4py>=4,<5', or stage_by: copy",
        ) from None
    comm: Comm = MPI.COMM_WORLD
    begun = time.monotonic()
    target = target_of(given)
    # All or none take part: a broadcast waits for every process.
    if not all(comm.allgather(is_staged(target))):
        spread(comm, target, given.sources)
    vouch(target, time.monotonic() - begun)
    return 0


def spread(comm: Comm, target: Target, sources: Sequence[Path], chunk: int = CHUNK) -> None:
    """Send ``sources`` from process 0 to the ``target`` of every process.

    Raises:
        WriteError: they cannot be read, or not be written here.
    """
    pieces = received(comm, sources, chunk)
    try:
        stage(target, [source.name for source in sources], lambda part: unpack(pieces, part))
    finally:
        for _ in pieces:  # whatever happened here, the others wait for each piece
            pass
