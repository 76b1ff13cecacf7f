#!/usr/bin/env bash
# Start two servers of a 7B model, one a card, beside a server and an offline engine over both cards;
# then run gpu_two_cards.py. For a machine with two GPUs and vLLM 0.26; $1 has vllm_start and vllm_wait.
# Usage: bash benchmarks/gpu_two_cards.sh SERVE.sh    (results under $OUT)
set -u
began=$SECONDS
# shellcheck source=/dev/null
. "$1"
model=qwen2.5-7b-dummy kv=16G
start_first() { CUDA_VISIBLE_DEVICES=0 vllm_start 8000 --gpu-memory-utilization 0.2 --kv-cache-memory-bytes $kv; }
start_second() { CUDA_VISIBLE_DEVICES=1 vllm_start 8001 --gpu-memory-utilization 0.2 --kv-cache-memory-bytes $kv; }
if [ "${2:-}" = restart ]; then start_second; exit; fi

vllm_unpack
DEVICE=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | tr -s ' \n' ' ')
export DEVICE
start_first; start_second
vllm_start 8002 --data-parallel-size 2 --gpu-memory-utilization 0.2 --kv-cache-memory-bytes $kv
setsid nohup python3 benchmarks/gpu_offline.py batch /tmp/model --port 8003 --dummy --memory 0.2 \
  --kv-bytes 17179869184 --replicas 2 > "$OUT/offline.log" 2>&1 &
vllm_wait 8000 170 || exit 1
vllm_wait 8001 60 || exit 1
vllm_wait 8002 60
for _ in $(seq 60); do curl -sf -o /dev/null http://127.0.0.1:8003/health && break; sleep 0.5; done
tail -c 1500 "$OUT/offline.log" | tail -3
echo "servers after $((SECONDS-began)) s"
nvidia-smi --query-gpu=index,memory.used --format=csv,noheader
tenant='CUDA_VISIBLE_DEVICES=1 exec python3 -c "
import torch
a = torch.randn(8192, 8192, device=\"cuda\", dtype=torch.bfloat16)
while True:
    for _ in range(50):
        b = a @ a
    torch.cuda.synchronize()
"'
printf '%s\n' "$tenant" > /tmp/tenant.sh
PYTHONPATH=$PWD:/tmp/client:$PYTHONPATH python3 benchmarks/gpu_two_cards.py "$OUT" --model $model \
  --at 127.0.0.1:8000 --at 127.0.0.1:8001 --pid-file /tmp/vllm-8001.pid \
  --restart "bash $0 $1 restart" --tenant "bash /tmp/tenant.sh" \
  --replicated 127.0.0.1:8002 --offline 127.0.0.1:8003 --seconds $((560-(SECONDS-began)))
for port in 8000 8001 8002; do tail -c 200000 "$OUT/server-$port.log" > "$OUT/s$port.txt"; rm "$OUT/server-$port.log"; done
tail -c 100000 "$OUT/offline.log" > "$OUT/offline.txt"; rm "$OUT/offline.log"; rm -rf "$OUT/bench"
