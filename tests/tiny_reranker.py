"""Tiny random models of Qwen3-Reranker's form: folders of causal models and classifiers, and llama.cpp's GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 32, 2, 4, 2, 16, 64, 1024
PHRASES = (  # tokens, so that prompts are short
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided.",
    "Note that the answer can only be",
    "Given a web search query, retrieve relevant passages that answer the query",
)
PLAIN = ("<think>", "</think>", *PHRASES)  # added tokens that are no control tokens
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("y", "e"), ("ye", "s"), ("n", "o"), ("Ġ", "t"), ("e", "r"), ("Ġ", "Ġ")]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE = (  # as in the folders of the model that state it
    "{%- set task = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | "
    f"default('{INSTRUCTION}') -%}}\n{SYSTEM}<Instruct>: {{{{ task }}}}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}" + END + "\n"
)
RERANK = f"{SYSTEM}<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}{END}"

FORMS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "one-label": {"labels": 1},
    "two-labels": {"labels": 2},
}


def write(folder: Path, template: str = TEMPLATE, tied: bool = True, labels: int = 0, context: int = CONTEXT) -> Path:
    """Write a folder: of a causal model, or with 1 or 2 `labels` of a classifier."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _tokenizer(folder, template)
    rng = np.random.default_rng(5)

    def matrix(rows: int, columns: int, gain: float = 2) -> np.ndarray:
        return rng.normal(0, gain / columns**0.5, (rows, columns)).astype(np.float32)

    def gains(size: int) -> np.ndarray:
        return (1 + 0.3 * rng.normal(size=size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(tokens, HIDDEN, 1), "model.norm.weight": gains(HIDDEN)}
    for at in range(LAYERS):
        layer = {
            **{
                "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            },
            **{
                "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            },
            **{"self_attn.q_norm": gains(HEAD_DIM), "self_attn.k_norm": gains(HEAD_DIM)},
            **{
                "mlp.gate_proj": matrix(FFN, HIDDEN),
                "mlp.up_proj": matrix(FFN, HIDDEN),
                "mlp.down_proj": matrix(HIDDEN, FFN),
            },
            **{"input_layernorm": gains(HIDDEN), "post_attention_layernorm": gains(HIDDEN)},
        }
        tensors |= {f"model.layers.{at}.{name}.weight": values for name, values in layer.items()}
    if not tied:
        tensors["lm_head.weight"] = matrix(tokens, HIDDEN, 1)
    if labels:
        tensors["score.weight"] = matrix(labels, HIDDEN, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    names = {1: {"0": "LABEL_0"}, 2: {"0": "no", "1": "yes"}}
    config = {
        "architectures": ["Qwen3ForSequenceClassification" if labels else "Qwen3ForCausalLM"],
        **({"id2label": names[labels], "pad_token_id": 0} if labels else {}),
        **{"model_type": "qwen3", "vocab_size": tokens, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM},
        **{"intermediate_size": FFN, "max_position_embeddings": context, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        **{"tie_word_embeddings": tied, "hidden_act": "silu", "attention_bias": False},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _tokenizer(folder: Path, template: str) -> int:
    """Write the tokenizer's files; return the number of tokens."""
    vocabulary = {token: at for at, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in MERGES:
        vocabulary["".join(pair)] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2], "chat_template": template}))
    return backend.get_vocab_size(with_added_tokens=True)


def write_gguf(folder: Path, path: Path, template: str | None = RERANK, kind: str = "F32", **keys: Any) -> Path:
    """Write the file that llama.cpp's converter makes of a folder of a causal model: without its own head.

    kind  of the matrices
    keys  further keys, or in place of those of a reranker
    """
    import gguf
    from gguf_files import NAMES

    config, backend = (
        json.loads((folder / "config.json").read_text()),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocabulary = backend.get_vocab(with_added_tokens=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    kinds = {vocabulary[token]: 3 for token in SPECIAL} | {vocabulary[token]: 4 for token in PLAIN}
    writer.add_token_types([kinds.get(at, 1) for at in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_chat_template(CHAT)
    if template is not None:
        writer.add_string("tokenizer.chat_template.rerank", template)
    writer.add_uint32("qwen3.pooling_type", keys.get("pooling", 4))
    writer.add_array("qwen3.classifier.output_labels", keys.get("labels", ["yes", "no"]))
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["cls.output.weight"] = keys.get("head", head[[vocabulary["yes"], vocabulary["no"]]])
    names = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        **NAMES,
    }
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, values in tensors.items():
        _, _, within = name.removeprefix("model.layers.").partition(".")
        own = f"blk.{name.split('.')[2]}.{names[within]}" if name.startswith("model.layers.") else top.get(name, name)
        type_ = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(own, gguf.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
