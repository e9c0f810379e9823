#!/usr/bin/env bash
# One host with several GPUs: one process drives them all. Stopped early and saved (exit code 75), it is started again.
#
#   experiments/launch/host.sh --config=configs/quickstart.py --workdir=runs/quickstart
#   SSH_HOST=me@machine DIRECTORY=cispo_jax experiments/launch/host.sh ...   # over ssh, in a checkout there
#   PROCESSES=8 experiments/launch/host.sh ...                           # a process a GPU, e.g. to score on more cores
#
# SIGTERM to this script ends the run after its step and does not start it again.
#
# What to watch first: `nvidia-smi` shows every GPU busy and its memory taken while "step 1" runs; then, in metrics.jsonl,
# policy/rollout_mismatch_max near 0, and time/score small beside time/sample (otherwise config.rewards.workers).
set -euo pipefail
COMMAND=${COMMAND:-experiments.train} # or experiments.sft, experiments.evaluate, experiments.export
PYTHON=${PYTHON:-.venv/bin/python}
PROCESSES=${PROCESSES:-1}
PORT=${PORT:-8476}

if [[ -n ${SSH_HOST:-} ]]; then
  command=$(printf '%q ' env SSH_HOST= COMMAND="$COMMAND" PYTHON="$PYTHON" PROCESSES="$PROCESSES" PORT="$PORT" experiments/launch/host.sh "$@")
  exec ssh "$SSH_HOST" "cd $(printf '%q' "${DIRECTORY:-cispo_jax}") && exec $command"
fi

stop=
pids=()
trap 'stop=yes; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
while true; do
  pids=()
  for ((i = 0; i < PROCESSES; i++)); do
    if ((PROCESSES > 1)); then
      CUDA_VISIBLE_DEVICES=$i "$PYTHON" -m "$COMMAND" "$@" \
        --coordinator="localhost:$PORT" --num_processes="$PROCESSES" --process_id="$i" &
    else
      "$PYTHON" -m "$COMMAND" "$@" &
    fi
    pids+=($!)
  done
  worst=0
  for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done # a signal interrupts `wait`
    code=0
    wait "$pid" || code=$?
    if ((worst == 0 || worst == 75)) && ((code != 0)); then worst=$code; fi
  done
  if ((worst != 75)) || [[ -n $stop ]]; then exit "$worst"; fi
done
