#!/usr/bin/env bash
# Install OpenCode, an agent program for the command line, from npm's registry.
#
#   tests/real/install_opencode.sh [DIR]     default: .cache/real/opencode
#
# Ten seconds and 350 MB; needs npm. A second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec tests/real/install_npm.sh opencode-ai 1.18.33 opencode "${1:-.cache/real/opencode}"
