"""Names that the shell completes: job files, runs, sites and guides."""

from __future__ import annotations

from pathlib import Path


def job_files(incomplete: str) -> list[str]:
    """Return the YAML and JSONL files, and the folders, that begin with ``incomplete``."""
    folder, _, start = incomplete.rpartition("/")
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    names = []
    for path in _listed(Path(prefix or ".")):
        if not path.name.startswith(start) or path.name.startswith("."):
            continue
        if path.is_dir():
            names.append(f"{prefix}{path.name}/")
        elif path.suffix in (".yaml", ".yml", ".jsonl"):
            names.append(f"{prefix}{path.name}")
    return names


def run_names(incomplete: str) -> list[str]:
    """Return the runs under ``runs`` that begin with ``incomplete``."""
    return [
        path.name
        for path in _listed(Path("runs"))
        if path.name.startswith(incomplete) and (path / "run.json").is_file()
    ]


def sites(incomplete: str) -> list[str]:
    """Return the sites of batch scripts that begin with ``incomplete``."""
    from bagent.hpc.site import site_names

    return [name for name in site_names() if name.startswith(incomplete)]


def topics(incomplete: str) -> list[str]:
    """Return the topics of ``bagent guide`` that begin with ``incomplete``."""
    from bagent.cli.commands.guide import topics as guide_topics

    return [name for name in guide_topics() if name.startswith(incomplete)]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
