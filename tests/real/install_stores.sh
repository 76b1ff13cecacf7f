#!/usr/bin/env bash
# Install stores of others that take the place of S3, Google's and Azure's, and bagent's drivers.
#
#   tests/real/install_stores.sh [DIR]     default: .cache/real/stores
#
# Two minutes and 500 MB; Azurite needs npm. A second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath -m "${1:-.cache/real/stores}")
stamp=$dir/.installed
packages="moto[server]==5.2.5 gcp-storage-emulator==2026.7.19 gcsfs==2026.10.1 adlfs==2026.8.0"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages" ]; then
    echo "the stores are in $dir"
else
    rm -rf "$dir"
    # The Python of the tests, which import the drivers.
    "${PYTHON:-.venv/bin/python}" -m venv "$dir"
    # shellcheck disable=SC2086
    "$dir/bin/python" -m pip -qq --disable-pip-version-check install $packages
    echo "$packages" >"$stamp"
    echo "stores installed"
fi
tests/real/install_npm.sh azurite 3.37.0 azurite-blob "$(dirname "$dir")/azurite" ||
    echo "no Azurite to be had here: its test is skipped"
