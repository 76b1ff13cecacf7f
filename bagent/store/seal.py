"""Which run directories this user made: only for these are input files read again later.

``run.json`` may come from somebody else and name any file. Its ``seal`` is a keyed hash of what
it says of the input and the job, and of where the directory is. The key never leaves
``~/.local/state/bagent``; without one there are no seals, and no input is read again.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from bagent.store.inside import read_inside

_KEY_BYTES = 32


def seal(run_dir: Path, content: bytes) -> str:
    """The seal of what this process writes about a run; empty where no key can be kept."""
    key = _read_key() or _make_key()
    return _digest(key, run_dir, content) if key else ""


def is_sealed(run_dir: Path, content: bytes, found: str) -> bool:
    """Whether ``found`` is the seal that this user gave this content in this directory."""
    key = _read_key()
    return bool(key) and hmac.compare_digest(_digest(key, run_dir, content), found)


def _digest(key: bytes, run_dir: Path, content: bytes) -> str:
    place = os.fsencode(run_dir.resolve())
    return hmac.digest(key, len(place).to_bytes(4, "big") + place + content, "sha256").hex()


def _key_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "bagent" / "run.key"


def _read_key() -> bytes:
    with suppress(OSError, RuntimeError):
        key = read_inside(_key_path())
        return key if len(key) == _KEY_BYTES else b""
    return b""


def _make_key() -> bytes:
    """Make the key, whole at once: others may make it at the same time."""
    with suppress(OSError, RuntimeError):
        path = _key_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"run.key.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        finally:
            os.close(descriptor)
            temporary.unlink()
    return _read_key()
