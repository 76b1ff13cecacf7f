"""Files copied to a node's own disk: once, also where several processes of a node want them."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bagent.errors import MissingPackage, WriteError
from bagent.files import ensure_own_folder
from bagent.hpc.nodes import short, this_node

SENTINEL = ".staged"


@dataclass(frozen=True, slots=True)
class StagingTarget:
    """Where files go: ``folder`` on this node's disk, ``done`` the shared folder in which each
    node leaves a file of its name, ``signature`` what tells equal sources."""

    folder: Path
    done: Path
    signature: str


def signature(sources: Sequence[Path]) -> str:
    """A short text that changes when the names, sizes or times of the files change.

    Raises:
        WriteError: a source is missing.
    """
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        if not source.exists():
            raise WriteError(f"cannot stage {source}: it is not there")
        for path in [source, *sorted(source.rglob("*"))]:
            stat = path.stat()
            size = stat.st_size if path.is_file() else 0
            digest.update(f"{path}\0{size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process of this node at a time: two that unpack at once would mix their files.

    Raises:
        OSError: the folder is not this user's alone.
    """
    ensure_own_folder(folder)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_staged(target: StagingTarget) -> bool:
    """Whether the node has these very files, whole, in a folder of this user alone."""
    try:
        ensure_own_folder(target.folder)
        return (target.folder / SENTINEL).read_text(encoding="utf-8") == target.signature
    except OSError:
        return False


def stage(target: StagingTarget, names: Sequence[str], fill: Callable[[Path], None]) -> bool:
    """Bring files to ``target``; False where they were there already.

    They are made by ``fill`` in a folder aside, then moved into place, then vouched for: a half
    copy is never taken for a whole one.

    Args:
        names: the entries that ``fill`` makes in the folder it is given.

    Raises:
        WriteError: the disk refuses, or is full.
    """
    try:
        with locked(target.folder):
            if is_staged(target):
                return False
            (target.folder / SENTINEL).unlink(missing_ok=True)
            part = target.folder / ".part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            fill(part)
            for name in names:
                place = target.folder / name
                if place.is_dir() and not place.is_symlink():
                    shutil.rmtree(place)
                (part / name).rename(place)
            part.rmdir()
            (target.folder / SENTINEL).write_text(target.signature, encoding="utf-8")
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WriteError(
            f"cannot stage to {target.folder}: {reason}",
            hint="write cluster: {stage_to: FOLDER} of your own",
        ) from None
    return True


def mark_staged(target: StagingTarget, seconds: float) -> None:
    """Tell the job that this node has its files."""
    name = short(this_node())
    (target.done / name).write_text(f"{seconds:.1f}\n", encoding="utf-8")


def copy_into(sources: Sequence[Path]) -> Callable[[Path], None]:
    """A filler that copies files and folders."""

    def fill(part: Path) -> None:
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, part / source.name, symlinks=False)
            else:
                shutil.copy2(source, part / source.name)

    return fill


def unpack_into(archive: Path, size: int) -> Callable[[Path], None]:
    """A filler that unpacks a tar file of ``size`` bytes: a shorter one came only in part."""

    def fill(part: Path) -> None:
        with os.fdopen(os.open(archive, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid():
                raise OSError(f"{archive} belongs to another user")
            if status.st_size != size:
                raise OSError(f"{archive} has {status.st_size} of {size} bytes")
            with tarfile.open(fileobj=file) as tar:
                tar.extractall(part, filter="tar")  # nosec B202 # it filters

    return fill


def target_parser(prog: str) -> argparse.ArgumentParser:
    """The options that all ways of staging share."""
    parser = argparse.ArgumentParser(prog=f"bagent.hpc {prog}")
    parser.add_argument("--to", required=True, help="folder on this node's disk")
    parser.add_argument("--done", type=Path, required=True, help="shared folder of those done")
    parser.add_argument("--signature", required=True)
    parser.add_argument("sources", type=Path, nargs="+")
    return parser


def target_of(given: argparse.Namespace) -> StagingTarget:
    """The target that the options of :func:`target_parser` name."""
    return StagingTarget(Path(os.path.expandvars(given.to)), given.done, given.signature)


def signature_step(argv: list[str]) -> int:
    """Print the signature of some paths."""
    sys.stdout.write(signature([Path(word) for word in argv]) + "\n")
    return 0


def stage_step(argv: list[str]) -> int:
    """Bring paths to this node's disk, from where they are or from an archive on this node."""
    parser = target_parser("stage")
    parser.add_argument("--archive", help="a tar file of all sources")
    parser.add_argument("--size", type=int, default=0, help="its bytes")
    given = parser.parse_args(argv)
    begun = time.monotonic()
    target = target_of(given)
    fill = copy_into(given.sources)
    archive = Path(os.path.expandvars(given.archive)) if given.archive else None
    if archive is not None:
        fill = unpack_into(archive, given.size)
    try:
        stage(target, [source.name for source in given.sources], fill)
    finally:
        if archive is not None:
            archive.unlink(missing_ok=True)
    mark_staged(target, time.monotonic() - begun)
    return 0


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
        mpi_broadcast(comm, target, given.sources)
    mark_staged(target, time.monotonic() - begun)
    return 0


def mpi_broadcast(
    comm: Comm, target: StagingTarget, sources: Sequence[Path], chunk: int = CHUNK
) -> None:
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
