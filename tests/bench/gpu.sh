#!/usr/bin/env bash
# On a machine with a GPU: the gpu tests, then the flagship workload in process and through gRPC.
# Needs the packages of the engine and dev extras on PYTHONPATH. Results go to the folder $OUT.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-.}
export PYTHONPATH=protos:tokenizer_svc:engine_svc:client:kernels:.:${PYTHONPATH:-}
export PYTHONUNBUFFERED=1

timeout 300 python3 -m pytest -m gpu -p no:cacheprovider tests/engine tests/kernels 2>&1 |
  tee "$out/gpu_tests.log" | tail -5
for mode in --in-process ""; do
  timeout 200 python3 -m millstream.client bench $mode --load-format dummy --model qwen3-0.6b \
    --runs "${RUNS:-1}" --json "$out/flagship${mode}.json" 2>&1 | tail -8
done
