#!/usr/bin/env bash
# Run this on the machine with the GPU, in the root of a checkout. It runs GPU tests, then gpu.py, and writes to $OUT.
# It ends within ten minutes: the tests get two, and gpu.py starts no new part after five and a half.
set -u
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PACELINE_CACHE=/tmp/paceline-cache
site=/tmp/paceline-site
compgen -G ".gpu/wheels/*.whl" >/dev/null &&
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" --upgrade .gpu/wheels/*.whl
export PYTHONPATH=$PWD/src:$PWD:$site
demo=()
if compgen -G ".gpu/model.*" >/dev/null; then
    mkdir -p "$PACELINE_CACHE"
    cat .gpu/model.* >"$PACELINE_CACHE/SmolLM2-135M-Instruct.Q4_1.gguf"
    demo=(--demo)
fi
{ nvidia-smi; python3 -c 'import torch, triton; print(torch.__version__, triton.__version__)'; } 2>&1 | tee "$out/machine.log"
timeout 120 python3 -m pytest -q -p no:cacheprovider tests/kernels/cuda/test_cuda.py tests/kernels/cuda/test_kernels.py \
    tests/kernels/cuda/test_compile.py 2>&1 | tee "$out/tests.log"
python3 benchmarks/gpu.py --out "$out" --minutes 5.5 "${demo[@]}" "$@" 2>&1 | tee "$out/gpu.log"
