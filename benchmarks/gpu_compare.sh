#!/usr/bin/env bash
# bagent's modes on a 0.5B model with one and four API processes, beside LLM.generate and LLM.chat.
# For a machine with one GPU and vLLM 0.26; $1 has vllm_unpack, vllm_start and vllm_wait.
# Usage: bash benchmarks/gpu_compare.sh SERVE.sh    (results under $OUT)
set -u
began=$SECONDS
# shellcheck source=/dev/null
. "$1"
vllm_unpack
export MODEL=/tmp/model05 NAME=small DEVICE="NVIDIA H200"
kv=(--gpu-memory-utilization 0.1 --kv-cache-memory-bytes 8G)
vllm_start 8000 "${kv[@]}"
vllm_start 8001 "${kv[@]}" --api-server-count 4
setsid nohup python3 benchmarks/gpu_offline.py llm /tmp/model05 --port 8010 --dummy --memory 0.1 --kv-bytes 8589934592 > "$OUT/offline.log" 2>&1 &
vllm_wait 8000 150 || exit 1
vllm_wait 8001 60 || exit 1
for _ in $(seq 100); do curl -sf -o /dev/null http://127.0.0.1:8010/health && break; sleep 0.5; done
echo "servers after $((SECONDS-began)) s"
export PYTHONPATH=$PWD:/tmp/client:$PYTHONPATH # /tmp/client: packages of bagent that the machine lacks
compare() { # shape rows seconds repeats arms
  timeout $(($3+40)) python3 benchmarks/gpu_compare.py "$OUT/modes-$1.json" --shape "$1" --rows "$2" --seconds "$3" --repeats "$4" --model small \
    --at api1=127.0.0.1:8000 --at api4=127.0.0.1:8001 --at offline=127.0.0.1:8010 --arms "$5" 2>&1 | cut -c1-260
}
compare long 200 125 6 auto@api1,offline@offline,single-256@api1,lists-64@api1
compare short 6000 140 5 auto@api1,lists-64@api1,auto@api4,lists-64@api4,offline@offline
left=$((550-(SECONDS-began)-10)); [ $left -gt 220 ] && left=220
compare review 2000 $left 3 auto@api1,single-512@api1,auto@api4,single-512@api4
rm -f "$OUT"/server-*.log; tail -c 3000 "$OUT/offline.log" > "$OUT/offline.txt"; rm -f "$OUT/offline.log"
echo "end after $((SECONDS-began)) s"
