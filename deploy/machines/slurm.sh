#!/bin/bash
# sbatch slurm.sh ORG/NAME /shared/NAME-NVFP4 [OPTIONS OF quantize]
# Each of eight tasks takes shards that nobody has; the last one ends the artifact in the shared folder.
# After a stop the same line goes on. fp4convert is installed in an environment of that disk, too.
#SBATCH --job-name=fp4convert
#SBATCH --array=0-7
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH --time=08:00:00
#SBATCH --requeue
set -eu
source=$1 output=$2
shift 2
exec fp4convert quantize "$source" -o "$output" --join --format nvfp4 --workers "$SLURM_CPUS_PER_TASK" "$@"
