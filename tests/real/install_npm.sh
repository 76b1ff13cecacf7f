#!/usr/bin/env bash
# Install a program from npm's registry into a folder of its own, and see that it starts.
#
#   tests/real/install_npm.sh PACKAGE VERSION PROGRAM DIR
#
# The program is then DIR/node_modules/.bin/PROGRAM.
set -euo pipefail
package=$1 version=$2 program=$3 dir=$(realpath -m "$4")
stamp=$dir/.installed

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then
    echo "$package $version is in $dir"
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "$package needs npm, which is not here" >&2
    exit 1
fi
rm -rf "$dir"
mkdir -p "$dir"
npm install --no-audit --no-fund --loglevel=error --prefix "$dir" "$package@$version" >/dev/null
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
HOME=$home "$dir/node_modules/.bin/$program" --version >/dev/null
echo "$version" >"$stamp"
echo "$package $version installed"
