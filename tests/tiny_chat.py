"""A random chat model small enough to generate hundreds of tokens a second on any backend."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

HIDDEN, LAYERS, HEADS, HEAD_DIM, FFN, CONTEXT = 32, 2, 4, 8, 48, 256
END, MASK = "<|im_end|>", "<|mask|>"
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
    folder: Path,
    seed: int = 0,
    template: str | None = TEMPLATE,
    masked: bool = False,
    context: int = CONTEXT,
    fim: Sequence[str] = (),
    control: Sequence[str] = (),
) -> Path:
    """A llama checkpoint of one-byte tokens with its tokenizer in `folder`; with `masked` a WeDLM one.

    fim      further tokens, which are not marked as special, as in Qwen's files; then two pairs of bytes are tokens too
    control  further control tokens
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(["<|im_start|>", END, *alphabet])}
    config: dict[str, str | int] = {"model_type": "llama"}
    if masked:
        config = {"model_type": "wedlm", "mask_token_id": len(vocabulary), "head_dim": HEAD_DIM}
        vocabulary[MASK] = len(vocabulary)
    merges = [("Ġ", "Ġ"), ("r", "e")] if fim else []
    for token in ["".join(pair) for pair in merges] + [*fim, *control]:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens(["<|im_start|>", END, *([MASK] if masked else []), *control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in fim])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(fim))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": END} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "config.json").write_text(
        json.dumps(
            {
                **config,
                "vocab_size": len(vocabulary),
                "hidden_size": HIDDEN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "intermediate_size": FFN,
                "max_position_embeddings": context,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
            }
        )
    )
    save_file(_weights(np.random.default_rng(seed), len(vocabulary), masked), folder / "model.safetensors")
    return folder


def end_texts(folder: Path) -> None:
    """Let the tokenizer in `folder` end each text with the end token, as Qwen3-Embedding's does."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(END, backend.token_to_id(END))]
    backend.post_processor = TemplateProcessing(single=f"$A {END}", pair=None, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))


def _weights(rng: np.random.Generator, tokens: int, masked: bool) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 2 / columns**0.5, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(tokens, HIDDEN),
        "lm_head.weight": matrix(tokens, HIDDEN),
    }
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": matrix(FFN, HIDDEN),
            "mlp.up_proj": matrix(FFN, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, FFN),
            "input_layernorm": np.ones(HIDDEN, np.float32),
            "post_attention_layernorm": np.ones(HIDDEN, np.float32),
        }
        if masked:
            layer |= {f"self_attn.{name}_norm": np.ones(HEAD_DIM, np.float32) for name in "qk"}
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return weights
