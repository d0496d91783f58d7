"""Write the pair as Hugging Face folders and as GGUF files.

    python export.py build/ out/

Reads target.pt, draft.pt and tokenizer.json; writes demo-qwen35/ and demo-qwen35-dflash/ (safetensors, bfloat16),
demo-qwen35-{Q8_0,Q4_K_S}.gguf, demo-qwen35-dflash-Q8_0.gguf and SHA256SUMS.
"""

import argparse
import ctypes
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from draft import MASK, Draft
from draft import load as load_draft
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from target import Config, Target
from target import load as load_target
from torch import nn

# A base model has no roles: a conversation is the text of its messages.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GGML = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
GGML.ggml_quantize_chunk.restype = ctypes.c_size_t
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
GGML.ggml_quantize_chunk.argtypes = [ctypes.c_int, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER]


def quantize(values: np.ndarray, type: Type) -> np.ndarray:
    """float32 (rows, columns) to the blocks of `type`, uint8 (rows, bytes per row)."""
    elements, size = gguf.GGML_QUANT_SIZES[type]
    rows, columns = values.shape
    values, out = np.ascontiguousarray(values), np.empty((rows, columns // elements * size), np.uint8)
    written = GGML.ggml_quantize_chunk(type, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert written == out.nbytes
    return out


def tiled_value_heads(name: str, values: np.ndarray, c: Config) -> np.ndarray:
    """Value heads from grouped by key head (h = g·R + r) to the tiled order of GGUF files (h = r·Hk + g)."""
    order = np.arange(c.v_heads).reshape(c.k_heads, -1).T.ravel()
    rows = (order[:, None] * c.state_dim + np.arange(c.state_dim)).ravel()
    keys = 2 * c.k_heads * c.state_dim
    if name in ("in_proj_qkv", "conv1d"):
        return np.concatenate([values[:keys], values[keys:][rows]])
    if name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return values[order]
    return {"in_proj_z": lambda: values[rows], "out_proj": lambda: values[:, rows]}.get(name, lambda: values)()


def target_tensors(model: Target) -> dict[str, np.ndarray]:
    """GGUF name to float32 values: norms hold 1 + w, A_log becomes −exp(A_log), value heads are tiled."""
    tensors = {}
    for name, weight in model.state_dict().items():
        values, parts = weight.float().numpy(), name.removesuffix(".weight").split(".")
        if "linear_attn" in parts:
            values = tiled_value_heads(parts[-1], values, model.c)
        elif "norm" in parts[-1]:
            values = 1 + values
        if parts[1] != "layers":
            tensors[{"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"] = values
            continue
        block, rest = f"blk.{parts[2]}.", ".".join(parts[3:])
        if rest == "linear_attn.A_log":
            tensors[block + "ssm_a"] = -np.exp(values)
        elif rest == "linear_attn.dt_bias":
            tensors[block + "ssm_dt.bias"] = values
        elif rest == "post_attention_layernorm":
            tensors[block + "post_attention_norm.weight"] = values
        else:
            tensors[block + NAMES[rest] + ".weight"] = values.squeeze(1) if values.ndim == 3 else values
    return tensors


def draft_tensors(model: Draft) -> dict[str, np.ndarray]:
    tensors, outer = {}, {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    for name, weight in model.state_dict().items():
        parts = name.removesuffix(".weight").split(".")
        rest = ".".join(parts[2:])
        inner = f"blk.{parts[1]}." + NAMES.get(rest, "ffn_norm") if len(parts) > 2 else outer[parts[0]]
        tensors[inner + ".weight"] = weight.float().numpy()
    return tensors


def write(
    path: Path,
    architecture: str,
    fill: Callable[[gguf.GGUFWriter], None],
    tokenizer_json: Path,
    tensors: dict[str, np.ndarray],
    type_of: Callable[[str], Type],
) -> None:
    """One GGUF file: metadata by `fill`, the tokenizer, and each tensor in the type of its name; vectors stay F32."""
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    tokenizer = json.loads(tokenizer_json.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {t["id"] for t in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_mask_token_id(MASK)
    writer.add_add_bos_token(False)
    for name, values in tensors.items():
        if values.ndim == 1 or "conv1d" in name:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            kind = type_of(name)
            writer.add_tensor(name, values if kind == Type.F32 else quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def about(writer: gguf.GGUFWriter, name: str, tensors: dict[str, np.ndarray]) -> None:
    writer.add_name(name)
    writer.add_license("apache-2.0")
    writer.add_size_label(f"{sum(v.size for v in tensors.values()) / 1e6:.0f}M")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def target_metadata(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_block_count(c.layers)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_freq_base(c.theta)
    writer.add_rope_dimension_count(c.rotary)
    writer.add_rope_dimension_sections([*c.rope_sections(), 0])
    writer.add_ssm_conv_kernel(c.taps)
    writer.add_ssm_state_size(c.state_dim)
    writer.add_ssm_group_count(c.k_heads)
    writer.add_ssm_time_step_rank(c.v_heads)
    writer.add_ssm_inner_size(c.v_heads * c.state_dim)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_chat_template(CHAT_TEMPLATE)


def draft_metadata(writer: gguf.GGUFWriter, draft: Draft, target: Config) -> None:
    c = draft.c
    writer.add_block_count(len(c.sliding))
    writer.add_context_length(target.context)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_freq_base(c.theta)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_dimension_sections([c.head_dim // 2, 0, 0, 0])
    writer.add_uint32("dflash.block_size", c.block)
    writer.add_array("dflash.target_layers", [i + 1 for i in c.taps])  # counted as the input of the next layer
    writer.add_uint32("dflash.attention.sliding_window", c.window)
    writer.add_array("dflash.attention.sliding_window_pattern", list(c.sliding))


def hugging_face(folder: Path, model: nn.Module, config: dict, tokenizer: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.bfloat16().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "mask_token": "<|mask|>",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_target(
    path: Path, c: Config, tensors: dict[str, np.ndarray], tokenizer: Path, type_of: Callable[[str], Type]
) -> None:

    def fill(writer: gguf.GGUFWriter) -> None:
        about(writer, "demo-qwen35", tensors)
        target_metadata(writer, c)

    write(path, "qwen35", fill, tokenizer, tensors, type_of)


def small_mix(name: str) -> Type:
    """Q4_K, with the feed-forward layers in Q3_K; the gate projections of a few rows stay Q8_0."""
    if "ssm_alpha" in name or "ssm_beta" in name:
        return Type.Q8_0
    return Type.Q3_K if "ffn" in name else Type.Q4_K


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    target, draft = load_target(args.folder / "target.pt"), load_draft(args.folder / "draft.pt")
    hugging_face(args.out / "demo-qwen35", target, target.c.hugging_face(), args.folder / "tokenizer.json")
    hugging_face(args.out / "demo-qwen35-dflash", draft, draft.c.hugging_face(target.c), None)

    tokenizer = args.folder / "tokenizer.json"
    large, small = target_tensors(target), draft_tensors(draft)
    write_target(args.out / "demo-qwen35-Q8_0.gguf", target.c, large, tokenizer, lambda _: Type.Q8_0)
    write_target(args.out / "demo-qwen35-Q4_K_S.gguf", target.c, large, tokenizer, small_mix)

    def fill(writer: gguf.GGUFWriter) -> None:
        about(writer, "demo-qwen35-dflash", small)
        draft_metadata(writer, draft, target.c)

    write(args.out / "demo-qwen35-dflash-Q8_0.gguf", "dflash", fill, tokenizer, small, lambda _: Type.Q8_0)
    files = sorted(args.out.glob("*.gguf"))
    sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    (args.out / "SHA256SUMS").write_text("".join(sums))
    print({f.name: f.stat().st_size for f in files}, sum(f.stat().st_size for f in files))


if __name__ == "__main__":
    main()
