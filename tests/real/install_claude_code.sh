#!/usr/bin/env bash
# Install Claude Code, an agent program for the command line, from npm's registry.
#
#   tests/real/install_claude_code.sh [DIR]     default: .cache/real/claude_code
#
# Ten seconds and 390 MB; needs npm. A second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec tests/real/install_npm.sh @anthropic-ai/claude-code 2.1.332 claude "${1:-.cache/real/claude_code}"
