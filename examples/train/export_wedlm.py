"""Write the WeDLM demo as a GGUF file: matrices in Q8_0, norms in float32.

    python export_wedlm.py build/demo-wedlm out/demo-wedlm-Q8_0.gguf

Reads the folder that train_wedlm.py wrote. The file's architecture is "wedlm", with the tensors of a Qwen3 file; its
mask token is tokenizer.ggml.mask_token_id.
"""

import argparse
import json
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import quants

from common.checkpoint import open_checkpoint
from common.quants import dequantize

NAMES = {
    "lm_head": "output",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
# A question is a line, and so is what the model was trained to begin its answers with.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


def gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.weight"
    return NAMES[".".join(parts)] + ".weight"


def metadata(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_name("demo-wedlm")
    writer.add_license("apache-2.0")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_float32("general.sampling.temp", 0.0)


def vocabulary(writer: gguf.GGUFWriter, tokenizer: dict, config: dict) -> None:
    """The tokens, and placeholders for the ids by which the vocabulary is padded."""
    ids = tokenizer["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    padding = range(len(tokens), config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in padding)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in padding)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_mask_token_id(config["mask_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text())
    writer = gguf.GGUFWriter(args.out, "wedlm")
    metadata(writer, config)
    vocabulary(writer, json.loads((args.folder / "tokenizer.json").read_text()), config)
    for name, tensor in open_checkpoint(args.folder).tensors.items():
        values = dequantize(tensor)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), quants.quantize(values, Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(args.out, args.out.stat().st_size)


if __name__ == "__main__":
    main()
