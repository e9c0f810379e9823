#!/usr/bin/env bash
# What an accelerator reaches, in under 8 minutes: decoding against its copy bandwidth, a train step against its matrix products.
# Usage: experiments/benchmarks/gpu.sh [PRESET] [FOLDER for the JSON files]; PYTHON=... chooses an interpreter.
# Random weights of a dense preset of 0.5 to 1.5B parameters in bfloat16. Stops at the first thing that fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
preset=${1:-qwen2.5-0.5b}
folder=${2:-runs/benchmarks}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"

"$python" -c 'import jax; print(jax.__version__, jax.devices())'
"$python" -m experiments.benchmarks.sampler --preset="$preset" --dtype=bfloat16 --cases wide skewed --rounds=3 \
    --json="$folder/sampler.json"
for attention in blocks cudnn; do
    "$python" -m experiments.benchmarks.train_step --preset="$preset" --dtype=bfloat16 --prompts=8 --group-size=8 --prompt=256 \
        --response=1024 --remat=attention --attention="$attention" --rounds=3 --json="$folder/train_step_$attention.json"
done
"$python" -m experiments.benchmarks.log_probs --tokens=16384 --embed=1024 --vocab=151936 --json="$folder/log_probs.json"
