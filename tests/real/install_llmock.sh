#!/usr/bin/env bash
# Install llmock: a mock of hosted providers that injects faults and judges its clients.
#
#   tests/real/install_llmock.sh [DIR]     default: .cache/real/llmock
#
# A few seconds; a second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath -m "${1:-.cache/real/llmock}")
stamp=$dir/.installed
version=0.2.2

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then
    echo "llmock $version is in $dir"
    exit 0
fi
rm -rf "$dir"
"${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/python" -m pip -qq --disable-pip-version-check install "llmock==$version"
echo "$version" >"$stamp"
echo "llmock $version installed"
