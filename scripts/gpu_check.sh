#!/usr/bin/env bash
# What only a GPU can show of primerl, in at most nine minutes, without network. In the repository's root, with the
# package and both examples installed:
#
#   bash scripts/gpu_check.sh                     all stages
#   bash scripts/gpu_check.sh attention step      these only
#   MODELS="Qwen3.5 gpt-oss" bash ...             families and hosted with models of these names only
#   REHEARSAL=1 bash scripts/gpu_check.sh         without a GPU: the same code with small sizes, on the CPU
#
# Each stage is one line of JSON in $OUT/results.jsonl, also on the terminal; what it prints is in $OUT/log.txt. A stage
# that fails does not end the others. Exit code: 0 all is well, 1 a stage has failed, 2 there is no GPU.
set -u
OUT=${OUT:-outputs/gpu-check}
LIMIT=${LIMIT:-530}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WANTED=" $* "
SLOWER=1
FAILED=0
if [ "${REHEARSAL:-}" = 1 ]; then
    SLOWER=6 LIMIT=2400
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no GPU here; REHEARSAL=1 tries the check on the CPU" >&2
    exit 2
fi
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false REHEARSAL=${REHEARSAL:-}
: >"$OUT/results.jsonl" && : >"$OUT/log.txt"

# name, seconds at most, command. Its last line of JSON is what it has found.
stage() {
    local name=$1 most=$(($2 * SLOWER)) left=$((LIMIT - SECONDS)) began=$SECONDS code=0 found
    shift 2
    [ "$WANTED" = "  " ] || [[ "$WANTED" == *" $name "* ]] || return 0
    if [ "$left" -lt 10 ]; then
        echo "{\"stage\": \"$name\", \"ok\": false, \"error\": \"no time is left\"}" | tee -a "$OUT/results.jsonl"
        FAILED=1
        return 0
    fi
    timeout -k 5 $((most < left ? most : left)) "$@" >"$OUT/stage.txt" 2>&1 || code=$?
    { echo "== $name"; cat "$OUT/stage.txt"; } >>"$OUT/log.txt"
    found=$(grep -E '^\{.*\}$' "$OUT/stage.txt" | tail -n 1)
    "$PYTHON" "$HERE/gpu_stages.py" --line "$name" "$code" $((SECONDS - began)) "${found:-}" | tee -a "$OUT/results.jsonl"
    [ "$code" -eq 0 ] || { FAILED=1; tail -n 12 "$OUT/stage.txt" >&2; }
    rm -f "$OUT/stage.txt"
}

for name in features attention step trees memory; do
    stage $name 60 "$PYTHON" "$HERE/gpu_stages.py" $name
done
# With flash-linear-attention it compiles for a minute and more.
stage families 150 "$PYTHON" "$HERE/gpu_stages.py" families
stage demo 200 "$PYTHON" "$HERE/gpu_stages.py" demo "$OUT/demo"
stage hosted 240 "$PYTHON" "$HERE/gpu_stages.py" hosted "$OUT/hosted"
# Needs the extra `tinker`.
stage tinker 90 "$PYTHON" "$HERE/gpu_stages.py" tinker "$OUT/tinker"
if [ "${REHEARSAL:-}" = 1 ]; then
    stage trainer 180 "$PYTHON" benches/trainer_gpu.py --shape tiny --tokens 512 --steps 2 --dtype float32
else
    stage trainer 180 "$PYTHON" benches/trainer_gpu.py
fi
exit $FAILED
