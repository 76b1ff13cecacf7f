"""Profiles and shell parts are there in an installed package too."""

from __future__ import annotations

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from bagent.hpc.site import deploy_folder

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_profiles_and_shell_parts_where_the_package_looks_for_them():
    included = WheelBuilder(str(ROOT)).recurse_included_files()
    packaged = {Path(file.path): file.distribution_path for file in included}
    folder = deploy_folder()
    needed = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in needed} >= {".sh", ".yaml"}
    for path in needed:
        assert packaged[path] == f"bagent/hpc/deploy/{path.relative_to(folder)}"
