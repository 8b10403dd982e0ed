#!/bin/bash
# The first minutes on a machine with an NVIDIA GPU: nothing is downloaded, nothing stops at a failure,
# and everything is in $OUT as soon as it is known. A part a call; nothing new begins after LIMIT seconds of it.
#
#   first_run.sh first      the machine, doctor, bytes in brief, the benchmark, the profiler
#   first_run.sh bytes      1 GB and more a kernel, 2^31 + 8192 elements, four sanitizers, on all cores
#   first_run.sh whole      whole conversions from /dev/shm, CPU beside GPU, every digest
#   first_run.sh variants   prepared forms of the kernels beside the shipped ones
#   first_run.sh page       judges every bar by what is in $OUT; needs no GPU
#
# The number after a stage's name is its seconds at most; those of a part add up to less than LIMIT. A stage that
# takes longer is interrupted, so that it can say what it knows, and killed 10 s later.
# Wanted of python3: numpy, ml_dtypes, safetensors, typer, rich, huggingface_hub, cupy and NVRTC, pytest with
# xdist and timeout; where fp4convert is not installed scikit-build-core and cmake, to build it in SITE.
set -um # m: a stage is a group of processes, and listens to INT
part=${1:-first}
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../../.." && pwd)
OUT=${OUT:-/tmp/out} SITE=${SITE:-/tmp/fp4convert-site}
LIMIT=${LIMIT:-560}
WHOLE=${WHOLE:---gigabytes 20} # of whole.py
cores=$(nproc)
mkdir -p "$OUT"
export PYTHONPATH=$SITE:$repository/benchmarks PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME="$SITE/cache"
# -P and a folder elsewhere: the checkout would come before $SITE, and it has no library. Benchmarks come by PYTHONPATH.
tests=(python3 -P -m pytest -v -m gpu -p no:cacheprovider -c "$repository/pyproject.toml" --rootdir "$repository")
on_gpu=("$repository/tests/numerics/test_on_gpu.py" "$repository/tests/kernels/test_beyond_32_bits.py")
bench=(python3 -P "$repository/benchmarks/bench.py")
touched=(python3 -P "$here/touch.py")

# run NAME SECONDS COMMAND...: its output, when it began and how it ended
run() {
    local name=$1 seconds=$2 left=$((LIMIT - SECONDS)) # SECONDS: of this call, bash counts them
    shift 2
    if [ $left -le 0 ]; then
        echo "-- $name: not run, the time is up"
        return
    fi
    echo "== $name, $(date +%T)"
    timeout --signal INT --kill-after 10 $((seconds < left ? seconds : left)) "$@" 2>&1 < /dev/null &
    local group=$! rc
    wait $group
    rc=$?
    kill -KILL -- -$group 2> /dev/null # what it has left running would keep the output open
    echo "-- $name: rc $rc, $(date +%T)"
}

build() {
    (cd /tmp && timeout 10 python3 -P -c "from fp4convert.numerics.backends.cpu import Cpu; Cpu()" > /dev/null 2>&1) && return
    run build 60 python3 -m pip install --quiet --no-index --no-build-isolation --no-deps --no-compile \
        --target "$SITE" "$repository"
    [ -d "$SITE/fp4convert" ] || echo "not built: is scikit-build-core there, and a C compiler?"
}

versions='import importlib.metadata as m
for name in ("numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "torch", "pytest"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, "is not there")'

metrics=gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,sm__inst_executed.sum
metrics+=,sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
metrics+=,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio
profiled="regex:^(amax|quantize|search|weigh|dequantize|gemv|compare|count|decode|transpose|grid|row|add|descend)_"

# profile NAME SECONDS PART...: counters of every kernel of those parts of touch.py
profile() {
    local name=$1 seconds=$2
    shift 2
    run "$name" "$seconds" ncu --clock-control none --csv --metrics "$metrics" --kernel-name "$profiled" "${touched[@]}" large "$@"
}

case $part in
first)
    {
        run nvidia-smi 10 nvidia-smi
        run nvcc 10 nvcc --version
        run versions 10 python3 -c "$versions"
        build
        cd /tmp || exit
        run doctor 30 python3 -P -m fp4convert doctor --json
    } | tee "$OUT/machine.txt"
    cd /tmp || exit
    run brief 60 "${tests[@]}" "${on_gpu[@]}" -k "inf_and_nan or code_pair or awkward or 32_bits" > "$OUT/brief.txt"
    tail -n 20 "$OUT/brief.txt"
    run benchmark 170 "${bench[@]}" gpu --seconds 140 --output "$OUT/gpu.md" > "$OUT/gpu.log"
    tail -n 40 "$OUT/gpu.log"
    profile profiler-mse 25 mse > "$OUT/ncu-mse.csv"
    profile profiler 40 elements > "$OUT/ncu.csv"
    profile profiler-others 40 products reports packed descents >> "$OUT/ncu.csv"
    ;;
bytes)
    {
        build
        cd /tmp || exit
        for tool in memcheck racecheck initcheck synccheck; do
            run "$tool" 480 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
                "${touched[@]}" small > "$OUT/$tool.txt" &
        done
        # a thread each: sixteen processes of sixteen threads would wait for one another
        export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
        run bytes 480 "${tests[@]}" -n $((cores > 3 ? cores - 2 : 1)) --timeout 400 --durations 15 \
            --junitxml "$OUT/bytes.xml" "${on_gpu[@]}"
        wait
    } > "$OUT/bytes.txt"
    tail -n 40 "$OUT/bytes.txt"
    cat "$OUT"/{memcheck,racecheck,initcheck,synccheck}.txt > "$OUT/sanitizer.txt"
    rm "$OUT"/{memcheck,racecheck,initcheck,synccheck}.txt
    grep -E "^--|^==|SUMMARY|^touch" "$OUT/sanitizer.txt"
    ;;
whole)
    {
        build
        cd /tmp || exit
        # shellcheck disable=SC2086
        run whole 480 python3 -P "$here/whole.py" "$OUT/whole.jsonl" $WHOLE
    } | tee "$OUT/whole.txt"
    ;;
variants)
    {
        build
        cd /tmp || exit
        run variants 480 "${bench[@]}" variants --seconds 440 --output "$OUT/variants.md"
    } > "$OUT/variants.log"
    grep -E "^#|^- |^--|^==" "$OUT/variants.log"
    ;;
page)
    run page 20 "${bench[@]}" bars "$OUT"
    ;;
*)
    echo "first_run.sh first|bytes|whole|variants|page" >&2
    exit 2
    ;;
esac
exit 0
