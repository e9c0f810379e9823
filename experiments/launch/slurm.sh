#!/usr/bin/env bash
# Several nodes with GPUs under SLURM, a process a GPU; jax finds the others through SLURM's environment.
#
#   NODES=4 GPUS=8 experiments/launch/slurm.sh --config=configs/X.py --workdir=/shared/runs/x
#
# submits this script; sbatch's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, ...) choose the rest. GRACE seconds
# before the time limit, and when it is preempted, the run stops after its step with exit code 75, and the job is requeued. --workdir and
# the checkout lie where every node sees them.
#
# What to watch first: "step 1" in slurm-JOB.out (it names the mesh's trouble before); `squeue --me` shows the job again, not gone, after
# the first time limit; on a hang, whether the nodes reach each other's port (NCCL_DEBUG=INFO names the network that NCCL took).
set -euo pipefail
COMMAND=${COMMAND:-experiments.train}
PYTHON=${PYTHON:-.venv/bin/python}
NODES=${NODES:-1}
GPUS=${GPUS:-8}

if [[ -z ${CISPO_JAX_JOB:-} ]]; then
  export COMMAND PYTHON CISPO_JAX_JOB=1
  # Without --gpus-per-task: jax gives each process the GPU of its local rank, so every task must see all of its node.
  exec sbatch --job-name=cispo_jax --nodes="$NODES" --ntasks-per-node="$GPUS" --gpus-per-node="$GPUS" --requeue \
    --open-mode=append --signal=TERM@"${GRACE:-300}" --export=ALL "$0" "$@"
fi

cd "$SLURM_SUBMIT_DIR"
trap : TERM # the tasks get it too; this shell waits for them
code=0
# Without --kill-on-bad-exit: the first task to end with 75 would have the others killed while they do the same. jax ends them after an error.
srun --kill-on-bad-exit=0 "$PYTHON" -m "$COMMAND" "$@" || code=$?
if ((code == 75)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
