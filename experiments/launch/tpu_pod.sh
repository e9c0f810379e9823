#!/usr/bin/env bash
# A TPU pod slice: created if it is not there, this checkout copied to every worker and installed, the command run on all of them. It is
# run again after exit code 75 (stopped early, saved), on a new slice where this one was preempted.
#
#   NAME=run ZONE=us-east5-a TYPE=v5p-256 SPOT=1 experiments/launch/tpu_pod.sh --config=configs/X.py --workdir=gs://BUCKET/run
#
# --workdir must be a bucket: the workers share no disk. The slice stays, and costs, until
# `gcloud compute tpus tpu-vm delete NAME --zone=ZONE`.
#
# What to watch first: "step 1" and its time beside step 2's (step 1 compiles); that WORKDIR/checkpoints/ appears in the bucket; on a hang
# before "model ready", whether all workers run (`gcloud compute tpus tpu-vm ssh NAME --worker=all --command='pgrep -c python'`).
set -euo pipefail
: "${NAME:?of the slice}" "${ZONE:?of the slice}" "${TYPE:?the accelerator type, e.g. v5p-256}"
COMMAND=${COMMAND:-experiments.train}
RUNTIME=${RUNTIME:-tpu-ubuntu2204-base}
SETUP=${SETUP:-sudo apt-get update -qq && sudo apt-get install -qq -y python3.11-venv}
INSTALL=${INSTALL:-python3.11 -m venv .venv && .venv/bin/python -m pip install --quiet -e \".[train,tpu]\" gcsfs}
PAUSE=${PAUSE:-30} # seconds before another try

tpu() { gcloud compute tpus tpu-vm "$1" "$NAME" --zone="$ZONE" "${@:2}"; }
on_workers() { tpu ssh --worker=all --command="$1"; }
state() { tpu describe --format='value(state)' 2>/dev/null || true; } # empty: no such slice

archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
tar -czf "$archive" --exclude='./.*' --exclude=./runs --exclude=__pycache__ .
run=$(printf '%q ' .venv/bin/python -m "$COMMAND" "$@")

ready=
while true; do
  now=$(state)
  if [[ $now != READY ]]; then
    ready=
    if [[ -n $now ]]; then tpu delete --quiet; fi
    tpu create --accelerator-type="$TYPE" --version="$RUNTIME" ${SPOT:+--spot}
  fi
  if [[ -z $ready ]]; then
    gcloud compute tpus tpu-vm scp "$archive" "$NAME:cispo_jax.tar.gz" --zone="$ZONE" --worker=all
    on_workers "set -e; $SETUP; mkdir -p cispo_jax; cd cispo_jax; tar -xzf ../cispo_jax.tar.gz; $INSTALL"
    ready=yes
  fi
  code=0
  on_workers "cd cispo_jax && $run" || code=$?
  # A preempted slice ends the command in its own way: its state tells.
  if ((code == 0)) || { ((code != 75)) && [[ $(state) == READY ]]; }; then exit "$code"; fi
  sleep "$PAUSE"
done
