#!/bin/bash
# The first minutes on a machine with an NVIDIA GPU: nothing is downloaded, nothing stops at a failure,
# and everything is in $OUT as soon as it is known. A part a call; nothing new begins after LIMIT seconds of it.
#
#   first_run.sh first   the machine, doctor, bytes in brief, the benchmark, four sanitizers, the profiler
#   first_run.sh bytes   tests/numerics/test_on_gpu.py on 14 processes, 1 GB and more a kernel
#   first_run.sh whole   whole conversions from /dev/shm, CPU beside GPU, every digest
#
# Wanted of python3: numpy, ml_dtypes, safetensors, typer, rich, huggingface_hub, cupy and NVRTC, pytest with
# xdist and timeout; where fp4convert is not installed scikit-build-core and cmake, to build it in SITE.
set -u
part=${1:-first}
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../../.." && pwd)
OUT=${OUT:-/tmp/out} SITE=${SITE:-/tmp/fp4convert-site}
LIMIT=${LIMIT:-530}
mkdir -p "$OUT"
export PYTHONPATH=$SITE:$repository/benchmarks PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME="$SITE/cache"
# -P and a folder elsewhere: the checkout would come before $SITE, and it has no library. Benchmarks come by PYTHONPATH.
tests=(python3 -P -m pytest -q -p no:cacheprovider -c "$repository/pyproject.toml" --rootdir "$repository")
on_gpu=$repository/tests/numerics/test_on_gpu.py

# run NAME SECONDS COMMAND...: its output, when it began and how it ended
run() {
    local name=$1 seconds=$2 left=$((LIMIT - SECONDS)) # SECONDS: of this call, bash counts them
    shift 2
    if [ $left -le 0 ]; then
        echo "-- $name: not run, the time is up"
        return
    fi
    echo "== $name, $(date +%T)"
    timeout $((seconds < left ? seconds : left)) "$@" 2>&1
    echo "-- $name: rc $?, $(date +%T)"
}

build() {
    (cd /tmp && python3 -P -c "from fp4convert.numerics.backends.cpu import Cpu; Cpu()" 2> /dev/null) && return
    run build 90 python3 -m pip install --quiet --no-index --no-build-isolation --no-deps --no-compile \
        --target "$SITE" "$repository"
    [ -d "$SITE/fp4convert" ] || echo "not built: is scikit-build-core there, and a C compiler?"
}

versions='import importlib.metadata as m
for name in ("numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch", "pytest"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, "is not there")'

case $part in
first)
    {
        run nvidia-smi 20 nvidia-smi
        run nvcc 20 nvcc --version
        run versions 20 python3 -c "$versions"
        build
        cd /tmp || exit
        run doctor 60 python3 -P -m fp4convert doctor --json
    } | tee "$OUT/machine.txt"
    run brief 90 "${tests[@]}" -x "$on_gpu" -k "inf_and_nan or code_pair or awkward or products or 32_bits" | tee "$OUT/brief.txt"
    run benchmark 200 python3 -P "$repository/benchmarks/bench.py" gpu --seconds 160 --output "$OUT/gpu.md" > "$OUT/gpu.log"
    tail -n 40 "$OUT/gpu.log"
    for tool in memcheck racecheck initcheck synccheck; do
        run "$tool" 25 compute-sanitizer --tool "$tool" --print-limit 20 python3 -P "$here/touch.py" small
    done | tee "$OUT/sanitizer.txt" | grep -E "^--|^==|SUMMARY"
    metrics=gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
    metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,sm__inst_executed.sum
    metrics+=,sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active
    metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
    metrics+=,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio
    run profiler 70 ncu --clock-control none --launch-count 60 --csv --metrics "$metrics" \
        -k "regex:^(amax|quantize|search|dequantize|gemv|compare|count)_" python3 -P "$here/touch.py" large > "$OUT/ncu.csv"
    ;;
bytes)
    {
        build
        cd /tmp || exit
        run bytes 520 "${tests[@]}" -n 14 --timeout 400 --durations 15 --junitxml "$OUT/bytes.xml" "$on_gpu"
    } | tee "$OUT/bytes.txt"
    ;;
whole)
    {
        build
        cd /tmp || exit
        run whole 520 python3 -P "$here/whole.py" "$OUT/whole.jsonl" --gigabytes 20
    } | tee "$OUT/whole.txt"
    ;;
*)
    echo "first_run.sh first|bytes|whole" >&2
    exit 2
    ;;
esac
exit 0
