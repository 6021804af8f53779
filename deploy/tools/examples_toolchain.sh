#!/usr/bin/env bash
# Gets what examples/ is built with on a bare Debian: a C++ compiler with gRPC, and Node with the
# example's packages. Installs only what is missing; needs root for that.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=()
has_cpp() { pkg-config --exists grpc++ protobuf && command -v g++ grpc_cpp_plugin protoc; }
has_cpp >/dev/null 2>&1 ||
  packages+=(g++ make pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc)
command -v npm >/dev/null || packages+=(nodejs npm)
if [ ${#packages[@]} -gt 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}"
fi
npm --prefix examples/node ci --no-audit --no-fund
