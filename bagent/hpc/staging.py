"""Staging of files to a node's own disk, once for all its processes."""

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
from bagent.hpc.allocation import short, this_node

SENTINEL = ".staged"


@dataclass(frozen=True, slots=True)
class StagingTarget:
    """Where files are staged."""

    folder: Path  # on this node's disk
    done: Path  # shared; each node that is done leaves a file in it
    signature: str  # of the sources


def signature(sources: Sequence[Path]) -> str:
    """Return a text that changes with the names, sizes and times of the files.

    Raises:
        WriteError: a source is missing.
    """
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        if not source.exists():
            raise WriteError(
                f"cannot stage {source}: it is not there",
                hint="write an existing path under cluster: stage",
            )
        for path in [source, *sorted(source.rglob("*"))]:
            stat = path.stat()
            size = stat.st_size if path.is_file() else 0
            digest.update(f"{path}\0{size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that one process of this node stages at a time.

    Raises:
        OSError: other users can write to the folder.
    """
    ensure_own_folder(folder)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_staged(target: StagingTarget) -> bool:
    """Return whether the node has these files, in a folder that only this user can write."""
    try:
        ensure_own_folder(target.folder)
        return (target.folder / SENTINEL).read_text(encoding="utf-8") == target.signature
    except OSError:
        return False


def stage(target: StagingTarget, names: Sequence[str], fill: Callable[[Path], None]) -> bool:
    """Stage files to ``target``; return False if they are there already.

    ``fill`` creates them in a temporary folder. They are moved into place and then marked as
    complete.

    Args:
        target: where to stage.
        names: the entries that ``fill`` creates.
        fill: creates the files in the given folder.

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
                path = target.folder / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                (part / name).rename(path)
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
    """Record that this node has its files."""
    name = short(this_node())
    (target.done / name).write_text(f"{seconds:.1f}\n", encoding="utf-8")


def copy_into(sources: Sequence[Path]) -> Callable[[Path], None]:
    """Return a function that copies files and folders."""

    def fill(part: Path) -> None:
        for source in sources:
            if source.is_dir():
                shutil.copytree(source, part / source.name, symlinks=False)
            else:
                shutil.copy2(source, part / source.name)

    return fill


def unpack_into(archive: Path, size: int) -> Callable[[Path], None]:
    """Return a function that unpacks a tar file of exactly ``size`` bytes."""

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
    """Return a parser with the options of all staging steps."""
    parser = argparse.ArgumentParser(prog=f"bagent.hpc {prog}")
    parser.add_argument("--to", required=True, help="folder on this node's disk")
    parser.add_argument("--done", type=Path, required=True, help="shared folder of those done")
    parser.add_argument("--signature", required=True)
    parser.add_argument("sources", type=Path, nargs="+")
    return parser


def target_of(args: argparse.Namespace) -> StagingTarget:
    """Return the target from the options of :func:`target_parser`."""
    return StagingTarget(Path(os.path.expandvars(args.to)), args.done, args.signature)


def signature_step(argv: list[str]) -> int:
    """Print the signature of some paths."""
    sys.stdout.write(signature([Path(word) for word in argv]) + "\n")
    return 0


def stage_step(argv: list[str]) -> int:
    """Stage paths to this node's disk, directly or from an archive on this node."""
    parser = target_parser("stage")
    parser.add_argument("--archive", help="a tar file of all sources")
    parser.add_argument("--size", type=int, default=0, help="its bytes")
    args = parser.parse_args(argv)
    begun = time.monotonic()
    target = target_of(args)
    fill = copy_into(args.sources)
    archive = Path(os.path.expandvars(args.archive)) if args.archive else None
    if archive is not None:
        fill = unpack_into(archive, args.size)
    try:
        stage(target, [source.name for source in args.sources], fill)
    finally:
        if archive is not None:
            archive.unlink(missing_ok=True)
    mark_staged(target, time.monotonic() - begun)
    return 0


CHUNK = 64 * 1024 * 1024
"""Bytes of one broadcast: enough to use the network, few enough for every node's memory."""


class Comm(Protocol):
    """The part of an mpi4py communicator that is used."""

    def Get_rank(self) -> int:
        """Return the rank of this process."""
        ...

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of process ``root`` in all processes."""
        ...

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all processes in all processes."""
        ...


def received(comm: Comm, sources: Sequence[Path], chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield the tar stream of ``sources`` in every process; process 0 reads them.

    Raises:
        WriteError: process 0 could not read them. All processes raise it.
    """
    tar = None
    if comm.Get_rank() == 0:
        options = [part for s in sources for part in ("-C", str(s.parent), s.name)]
        tar = subprocess.Popen(["tar", "-chf", "-", *options], stdout=subprocess.PIPE)
        assert tar.stdout is not None
    while True:
        data = tar.stdout.read(chunk) if tar is not None and tar.stdout is not None else None
        data = comm.bcast(data)
        if not data:
            break
        yield data
    code = None
    if tar is not None:
        if tar.stdout is not None:
            tar.stdout.close()
        code = tar.wait()
    code = comm.bcast(code)
    if code:
        raise WriteError(
            f"tar ended with exit code {code} while reading what is staged",
            hint="look at the messages of tar above",
        )


def unpack(chunks: Iterator[bytes], folder: Path) -> None:
    """Unpack a tar stream into ``folder``.

    All chunks are consumed even if the disk refuses: the other processes wait for them.

    Raises:
        OSError: the stream could not be unpacked.
    """
    broken = False
    with subprocess.Popen(["tar", "-xf", "-", "-C", str(folder)], stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        for data in chunks:
            try:
                if not broken:
                    tar.stdin.write(data)
            except OSError:
                broken = True
    if tar.returncode or broken:
        raise OSError("tar could not unpack all of it")


def broadcast_step(argv: list[str]) -> int:
    """Stage paths to all nodes of an MPI launch, with one process a node."""
    args = target_parser("broadcast").parse_args(argv)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingPackage(
            f"stage_by: mpi needs mpi4py and the MPI library of the machine: {error}",
            hint="pip install 'mpi4py>=4,<5', or stage_by: copy",
        ) from None
    comm: Comm = MPI.COMM_WORLD
    begun = time.monotonic()
    target = target_of(args)
    # A broadcast waits for every process, so all take part or none.
    if not all(comm.allgather(is_staged(target))):
        mpi_broadcast(comm, target, args.sources)
    mark_staged(target, time.monotonic() - begun)
    return 0


def mpi_broadcast(
    comm: Comm, target: StagingTarget, sources: Sequence[Path], chunk: int = CHUNK
) -> None:
    """Stage ``sources`` of process 0 to the ``target`` of every process.

    Raises:
        WriteError: they cannot be read or written.
    """
    chunks = received(comm, sources, chunk)
    try:
        stage(target, [source.name for source in sources], lambda part: unpack(chunks, part))
    finally:
        for _ in chunks:  # the other processes wait for each chunk
            pass
