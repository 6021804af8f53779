#!/usr/bin/env bash
# Writes the stubs of protos/millstream/v1 into the folder $1 (default: beside the protos).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-protos}
python=${PYTHON:-.venv/bin/python}
PATH="$(dirname "$(command -v "$python")"):$PATH"
common=$("$python" -c 'import google.rpc, os; print(os.path.join(list(google.rpc.__path__)[0], "../.."))')
"$python" -m grpc_tools.protoc -Iprotos -I"$common" \
  --python_out="$out" --grpc_python_out="$out" \
  --mypy_out=quiet:"$out" --mypy_grpc_out=quiet,only_async:"$out" \
  protos/millstream/v1/*.proto
