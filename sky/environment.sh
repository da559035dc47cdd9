#!/usr/bin/env bash
# For nodes without a container: installs `skytrain` from the work tree of this script. The environment lies in the user's
# own home, under the checksum of its requirements. Slurm's nodes share that home, so eight recoveries install it once.
# SKYTRAIN_VENV names an existing environment, which stays unchanged.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
venv=${SKYTRAIN_VENV:-}
if [ -z "$venv" ]; then
  PATH="$HOME/.local/bin:$PATH"   # SkyPilot installs uv there
  own_home=$(getent passwd "$(id -un)" | cut -d: -f6)   # on Slurm, HOME belongs to the cluster and is removed with it
  gpus=$tree/docker/locks/cuda.in   # the torch that was measured on GPUs; its pins replace those of constraints.txt
  sum=$(cat "$tree/pyproject.toml" "$tree/constraints.txt" "$gpus" | sha256sum | cut -c1-16)
  venv=$own_home/.cache/skytrain/venv-$sum
  mkdir -p "$(dirname "$venv")"
  exec 9> "$venv.lock" && flock 9   # the second process waits, then finds it complete
  install() {
    rm -rf "$venv"
    uv venv --python '>=3.11,<3.13' "$venv" &&
    sed -n 's/^\([a-z-]*==\).*/^\1/p' "$gpus" | grep -vf - "$tree/constraints.txt" | cat - "$gpus" > "$venv/constraints.txt" &&
    uv pip install --python "$venv/bin/python" --constraint "$venv/constraints.txt" "$tree[formats,eval,tune,float8]" &&
    touch "$venv/made"
  }
  for pause in 0 15 30 60; do   # beside uv's own tries
    sleep $pause
    [ ! -e "$venv/made" ] && ! install 2>&1 | tee "$venv.log" || break
    grep -qE 'Failed to (fetch|download)|error sending request' "$venv.log" || exit 1   # another try would not help
  done
fi
mkdir -p "$HOME/.local/bin"
if [ -z "${SKYTRAIN_VENV:-}" ] && [ ! -e "$venv/made" ]; then
  # SkyPilot ends a job whose setup fails, and starts one elsewhere whose run exits with 75.
  printf '#!/bin/sh\necho "the package index does not answer; see above" >&2\nexit 75\n' > "$HOME/.local/bin/skytrain"
  chmod +x "$HOME/.local/bin/skytrain"
  exit
fi
# `skytrain` runs the code of the work tree, not the copy in the environment.
printf '#!/bin/sh\nPYTHONPATH="%s" exec "%s/bin/python" -m pipelines.cli "$@"\n' "$tree" "$venv" > "$HOME/.local/bin/skytrain"
chmod +x "$HOME/.local/bin/skytrain"
