#!/bin/bash
# Trains with one process per task, also after the job had to make room for another one:
#   sbatch --ntasks=4 job.sh millrace cnn train --config digits_demo --num-replicas 4 --run-dir runs/first
#SBATCH --requeue --open-mode=append --signal=TERM@120

srun --kill-on-bad-exit "$@" --auto-resume
status=$?

# 130: asked to stop, by --signal before the time limit or by preemption with a grace time,
# and a checkpoint is saved. Slurm would call the job failed; put it back into the queue.
if [ "$status" -eq 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
