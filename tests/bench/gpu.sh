#!/usr/bin/env bash
# On a machine with a GPU: the gpu tests, then the flagship workload in process and through gRPC, and
# in turns with nano-vllm where that is on PYTHONPATH. Needs the packages of the engine and dev
# extras, and pytest-xdist, on PYTHONPATH. Results go to the folder $OUT.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-.}
export PYTHONPATH=protos:tokenizer_svc:engine_svc:client:kernels:.:${PYTHONPATH:-}
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=2 # a tiny model on a CPU is what many tests compare with: eight of them at once

# Tests that take much of the card's memory run alone; of the others compiling kernels is what takes time.
alone=(
  tests/engine/test_batch_invariance.py
  tests/kernels/test_batch_invariance.py
  tests/engine/test_gpu.py::test_two_engines_share_a_gpu
  tests/engine/test_gpu_edits.py::test_edits_of_every_slot_fit_in_what_was_reserved
)
gpu_tests() { # NAME ARGUMENTS...
  # Names as they end, and a summary even when time is up; a hung kernel hears no Ctrl-C.
  timeout -s INT -k 30 "${TESTS_S:-200}" python3 -m pytest -m gpu -vv -p no:cacheprovider "${@:2}" \
    > "$out/$1.log" 2>&1
  grep -aE "FAILED|ERROR| passed| failed" "$out/$1.log" | cut -c1-300
}
gpu_tests together -n 8 --tb=short tests/engine tests/kernels "${alone[@]/#/--deselect=}"
gpu_tests alone --tb=short "${alone[@]}"
for mode in --in-process ""; do
  timeout 200 python3 -m millstream.client bench $mode --load-format dummy --model qwen3-0.6b \
    --runs "${RUNS:-2}" --json "$out/flagship${mode}.json" 2>&1 | tail -2
done
if python3 -c 'import nanovllm, flash_attn' 2> /dev/null; then
  timeout 400 python3 -m tests.bench.nano_vllm --turns "${TURNS:-1}" 2>&1 | tee "$out/ratio.log" | tail -7
fi
