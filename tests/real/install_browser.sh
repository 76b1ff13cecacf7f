#!/usr/bin/env bash
# Install what drives a real browser: Playwright, axe-core, and as root Debian's Chromium.
#
#   tests/real/install_browser.sh [DIR]     default: .cache/real/browser
#
# A minute; a second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath -m "${1:-.cache/real/browser}")
stamp=$dir/.installed
packages="playwright==1.65.2"
axe=4.14.1

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages $axe" ] && command -v chromium >/dev/null; then
    echo "the browser's driver is in $dir"
    exit 0
fi
if ! command -v chromium >/dev/null; then
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
rm -rf "$dir"
"${PYTHON:-python3}" -m venv "$dir"
# shellcheck disable=SC2086
"$dir/bin/python" -m pip -qq --disable-pip-version-check install $packages
(cd "$dir" && npm pack --silent "axe-core@$axe" >/dev/null && tar -xzf axe-core-*.tgz package/axe.min.js && rm axe-core-*.tgz)
echo "$packages $axe" >"$stamp"
echo "the browser's driver is in $dir"
