#!/usr/bin/env bash
# Fails unless the committed stubs are what the protos generate, and the protos pass buf's lint.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
PATH="$(dirname "$(command -v "$python")"):$PATH"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

deploy/tools/gen_protos.sh "$work"
for file in "$work"/millstream/v1/*; do
  cmp "$file" "protos/millstream/v1/$(basename "$file")" || {
    echo "stubs are not current: run 'make proto' and commit" >&2
    exit 1
  }
done

# buf cannot fetch google/rpc/*.proto without its registry: it lints an image built by protoc.
common=$("$python" -c 'import google.rpc, os; print(os.path.join(list(google.rpc.__path__)[0], "../.."))')
"$python" -m grpc_tools.protoc -Iprotos -I"$common" --include_imports --include_source_info \
  --descriptor_set_out="$work/image.binpb" protos/millstream/v1/*.proto
buf lint "$work/image.binpb" --config "$(python3 - <<'JSON'
import json
print(json.dumps({"version": "v2", "lint": {"use": ["STANDARD", "COMMENTS"], "except": ["SERVICE_SUFFIX"], "ignore": ["google"]}}))
JSON
)"
echo "protos: stubs current, lint clean"
