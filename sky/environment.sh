#!/usr/bin/env bash
# For nodes that run no container: makes `skytrain` out of the work tree that this script lies in. The environment is
# kept under its ingredients' sum in the user's own home, which Slurm's nodes share: eight recoveries install it once.
# SKYTRAIN_VENV names one that is there already and is left as it is.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
venv=${SKYTRAIN_VENV:-}
if [ -z "$venv" ]; then
  PATH="$HOME/.local/bin:$PATH"   # SkyPilot puts uv there
  own_home=$(getent passwd "$(id -un)" | cut -d: -f6)   # on Slurm HOME is the cluster's, and is removed with it
  sum=$(cat "$tree/pyproject.toml" "$tree/constraints.txt" | sha256sum | cut -c1-16)
  venv=$own_home/.cache/skytrain/venv-$sum
  mkdir -p "$(dirname "$venv")"
  exec 9> "$venv.lock" && flock 9   # who comes second finds it made
  if [ ! -e "$venv/made" ]; then
    rm -rf "$venv"
    uv venv --python '>=3.11,<3.13' "$venv"
    uv pip install --python "$venv/bin/python" --constraint "$tree/constraints.txt" "$tree"
    touch "$venv/made"
  fi
fi
# The code that runs is the work tree's, not what was installed with the environment.
mkdir -p "$HOME/.local/bin"
printf '#!/bin/sh\nPYTHONPATH="%s" exec "%s/bin/python" -m pipelines.cli "$@"\n' "$tree" "$venv" > "$HOME/.local/bin/skytrain"
chmod +x "$HOME/.local/bin/skytrain"
