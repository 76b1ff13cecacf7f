#!/usr/bin/env bash
# bagent's modes with one and four API processes, beside LLM.generate, LLM.chat, run-batch and a loop over AsyncOpenAI.
# For a machine with one GPU and vLLM 0.26; $1 has vllm_unpack, vllm_start and vllm_wait.
# Usage: bash benchmarks/gpu_compare.sh SERVE.sh [small|large]    (results under $OUT; 0.5B or 7B of random weights)
set -u
began=$SECONDS size=${2:-small}
# shellcheck source=/dev/null
. "$1"
vllm_unpack
export NAME=$size DEVICE="NVIDIA H200"
if [ "$size" = large ]; then export MODEL=/tmp/model memory=0.2 kv_bytes=17179869184; else export MODEL=/tmp/model05 memory=0.1 kv_bytes=8589934592; fi
kv=(--gpu-memory-utilization $memory --kv-cache-memory-bytes $kv_bytes)
engine() { # kind port: an engine without HTTP in front
  setsid nohup python3 benchmarks/gpu_offline.py "$1" "$MODEL" --port "$2" --dummy --memory $memory --kv-bytes $kv_bytes > "$OUT/$1.log" 2>&1 &
}
vllm_start 8000 "${kv[@]}"
vllm_start 8001 "${kv[@]}" --api-server-count 4
engine llm 8010
engine batch 8011
vllm_wait 8000 200 || exit 1
vllm_wait 8001 60 || exit 1
for port in 8010 8011; do
  for _ in $(seq 160); do curl -sf -o /dev/null http://127.0.0.1:$port/health && break; sleep 0.5; done
done
echo "servers after $((SECONDS-began)) s"
export PYTHONPATH=$PWD:/tmp/client:$PYTHONPATH # /tmp/client: packages of bagent that the machine lacks
compare() { # shape rows seconds repeats arms
  timeout $(($3+40)) python3 benchmarks/gpu_compare.py "$OUT/modes-$size-$1.json" --shape "$1" --rows "$2" --seconds "$3" --repeats "$4" --model "$size" \
    --at api1=127.0.0.1:8000 --at api4=127.0.0.1:8001 --at llm=127.0.0.1:8010 --at batch=127.0.0.1:8011 --arms "$5" 2>&1 | cut -c1-260
}
if [ "$size" = small ]; then
  compare long 200 100 5 auto@api1,single-256@api1,lists-64@api1,offline@llm
  compare short 6000 110 5 auto@api1,lists-64@api1,auto@api4,lists-64@api4,offline@llm,openai-512@api4*2
fi
left=$((550-(SECONDS-began)-10))
compare review $([ "$size" = small ] && echo 2000 || echo 1000) $left 5 auto@api1,single-512@api1,lists-64@api1,auto@api4,single-512@api4,offline@llm,offline@batch*3,openai-512@api1*3
rm -f "$OUT"/server-*.log
for kind in llm batch; do tail -c 3000 "$OUT/$kind.log" > "$OUT/$kind.txt"; rm -f "$OUT/$kind.log"; done
echo "end after $((SECONDS-began)) s"
