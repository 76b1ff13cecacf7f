"""Copies of a run's tables in a bucket or a folder, complete for a reader at any moment.

The files go to a folder that their content names, then ``manifest.json`` names them. A reader that
begins with the manifest sees one whole publication, the last or the one before, whatever stops this
process. The publication before the last stays, for readers that have its manifest.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec

from bagent.errors import WriteError
from bagent.files import is_regular, open_regular
from bagent.remote.storage import RemoteError, Storage, retrying, storage_for
from bagent.store.tables.schema import TABLES

MANIFEST = "manifest.json"
AGAIN = "bagent publish {run} repeats it; the rows are safe in the run directory"
"""What to do after a publication that failed."""

_DATABASE = "run.duckdb"
_Folder = Annotated[str, msgspec.Meta(pattern=r"^tables-[0-9a-f]{16}\Z")]
"""Name of a folder that a publication makes; a manifest that names another one is refused."""


class PublishedFile(msgspec.Struct, frozen=True):
    """One published file: its path from the manifest on."""

    file: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The content of ``manifest.json``."""

    run: str
    """Name of the run."""
    folder: _Folder
    """Folder of the files."""
    tables: dict[str, PublishedFile]
    """Table, or ``run`` for the DuckDB file, and its file."""
    previous: tuple[_Folder, ...] = ()
    """Folders of earlier publications, the last one first; it stays, the others are deleted."""
    format: int = 1


def publish_tables(run_dir: Path, target: str) -> Manifest:
    """Copy the tables of a run to ``target``, unless the same ones are there; return the manifest.

    Args:
        run_dir: the run directory; its tables are up to date.
        target: URL or path of a folder.

    Raises:
        WriteError: there are no tables, the target has those of another run, or cannot be written.
        MissingPackage: the driver of its store is not installed.
    """
    hint = AGAIN.format(run=run_dir.name)
    try:
        return _publish(run_dir, target.rstrip("/"), storage_for(target))
    except RemoteError as error:
        raise WriteError(f"cannot publish to {target}: {error.strerror}", hint=hint) from error
    except OSError as error:
        raise WriteError(f"cannot publish {run_dir}: {error}", hint=hint) from error


def _publish(run_dir: Path, target: str, storage: Storage) -> Manifest:
    sources = _table_files(run_dir)
    if not sources:
        raise WriteError(
            f"{run_dir} has no tables to publish",
            hint="results: {parquet: true} makes them, then bagent query",
        )
    before = _read_manifest(storage, f"{target}/{MANIFEST}")
    if before is not None and before.run != run_dir.name:
        raise WriteError(
            f"{target} has the tables of the run {before.run}", hint="name another folder"
        )
    digests = {name: _digest(path) for name, path in sources.items()}
    listed = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    folder = f"tables-{sha256(listed.encode()).hexdigest()[:16]}"
    tables = {
        name: PublishedFile(f"{folder}/{path.name}", path.stat().st_size, digests[name])
        for name, path in sources.items()
    }
    previous: tuple[str, ...] = ()
    if before is not None:
        last = () if before.folder == folder else (before.folder,)
        previous = (*last, *(name for name in before.previous if name != folder))[:3]
    manifest = Manifest(run_dir.name, folder, tables, previous)
    for name, path in sources.items():
        _upload(storage, path, f"{target}/{tables[name].file}", tables[name].bytes)
    if any(_digest(path) != digests[name] for name, path in sources.items()):
        raise WriteError("the tables were made anew meanwhile", hint=AGAIN.format(run=run_dir.name))
    with tempfile.TemporaryDirectory(prefix="bagent-publish-") as temporary:
        content = Path(temporary) / MANIFEST
        content.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        retrying(lambda: storage.write(f"{target}/{MANIFEST}", content))
    for name in previous[1:]:
        _remove(storage, f"{target}/{name}")
    return manifest


def _table_files(run_dir: Path) -> dict[str, Path]:
    """Return the Parquet files, or the DuckDB file where the job makes no others."""
    files = {table: run_dir / f"{table}.parquet" for table in TABLES}
    parquet = {table: path for table, path in files.items() if is_regular(path)}
    database = run_dir / _DATABASE
    return parquet or ({"run": database} if is_regular(database) else {})


def _digest(path: Path) -> str:
    digest = sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _upload(storage: Storage, path: Path, url: str, size: int) -> None:
    """Write a file unless it is there: its folder names its content."""
    try:
        if retrying(lambda: storage.stat(url)).size == size:
            return
    except RemoteError as error:
        if not error.missing:
            raise
    retrying(lambda: storage.write(url, path))


def _read_manifest(storage: Storage, url: str) -> Manifest | None:
    try:
        stat = retrying(lambda: storage.stat(url))
        content = retrying(lambda: storage.read(stat, 0, stat.size))
        return msgspec.json.decode(content, type=Manifest)
    except RemoteError as error:
        if not error.missing:
            raise
        return None
    except msgspec.DecodeError as error:
        raise RemoteError(f"{url} is no manifest of bagent: {error}") from error


def _remove(storage: Storage, folder: str) -> None:
    """Delete the files of an old publication, and no others, as far as that is possible."""
    for name in (*(f"{table}.parquet" for table in TABLES), _DATABASE):
        with suppress(RemoteError):  # the next publication is complete without it
            storage.remove(f"{folder}/{name}")
