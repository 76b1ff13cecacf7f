"""Print what a wheel requires, less the packages that a CPU machine cannot or need not have.

    python wheel_requirements.py FILE.whl

Optional extras are left out, and so are torch (installed before, as a CPU build) and its three
companions for pictures and sound.
"""

from __future__ import annotations

import email
import re
import sys
import zipfile
from pathlib import Path

LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


def requirements(wheel: Path) -> list[str]:
    """Return the requirement lines of ``wheel`` that are to be installed."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    lines: list[str] = metadata.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and not LEFT_OUT.match(line)]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]))))
