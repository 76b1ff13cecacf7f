#!/usr/bin/env bash
# Install clients that users have, to try them against bagent: SDKs, frameworks, table libraries.
#
#   tests/real/install_clients.sh [DIR]     default: .cache/real/clients
#
# A minute or two; a second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath -m "${1:-.cache/real/clients}")
stamp=$dir/.installed
packages="openai==3.57.0 anthropic==2.14.0 litellm==1.110.2 langchain-openai==1.7.4
pydantic-ai-slim[openai]==2.68.0 inspect-ai==0.3.285 llm==0.36
pandas==3.1.1 polars==2.1.0 pyarrow==26.0.1 datasets==5.2.0 openpyxl==3.1.5 duckdb-cli==1.5.6"
# Older versions, in folders of their own.
older="openai==2.54.0 duckdb==1.1.3"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages $older" ]; then
    echo "clients are in $dir"
    exit 0
fi
rm -rf "$dir"
"${PYTHON:-python3}" -m venv "$dir"
# shellcheck disable=SC2086
"$dir/bin/python" -m pip -qq --disable-pip-version-check install $packages
for package in $older; do
    "$dir/bin/python" -m pip -qq --disable-pip-version-check install \
        --target "$dir/older/${package%%=*}" "$package"
done
echo "$packages $older" >"$stamp"
echo "clients installed"
