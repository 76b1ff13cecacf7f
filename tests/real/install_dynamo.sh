#!/usr/bin/env bash
# Install NVIDIA Dynamo's frontend and its mocker (a simulated engine behind a real router).
#
#   tests/real/install_dynamo.sh [DIR]     default: .cache/real/dynamo
#
# No torch, no GPU, no etcd, no NATS. About a minute and 0.7 GB; a second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath -m "${1:-.cache/real/dynamo}")
stamp=$dir/.installed
version=1.6.1

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then
    echo "dynamo $version is in $dir"
    exit 0
fi
started=$SECONDS
rm -rf "$dir"
"${PYTHON:-python3}" -m venv "$dir"
pip=("$dir/bin/python" -m pip -qq --disable-pip-version-check)

# Its requirements by hand: one of them, aisimulate, fetches its real code from elsewhere when it is
# installed, and only the --ais-* options need it.
"${pip[@]}" install 'pydantic>=2.10.6,<=2.13.5' 'uvloop>=0.21' 'aiohttp>=3.14.3,<4' certifi \
    'kubernetes>=32.0.1,<33' 'msgspec>=0.19' 'prometheus-client>=0.23.1,<1' 'pyzmq>=26' \
    'redis>=6.2,<9' tqdm 'transformers>=4.56' typing-extensions 'zstandard>=0.23,<1' pyyaml
"${pip[@]}" install --no-deps "ai-dynamo==$version" "ai-dynamo-runtime==$version"

echo "$version" >"$stamp"
echo "dynamo $version installed in $((SECONDS - started)) s"
