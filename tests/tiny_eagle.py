"""A random EAGLE-3 draft for a tiny target, as a safetensors folder, and its formula in float64."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from safetensors.numpy import save_file

from common.checkpoint import open_checkpoint
from common.quants import dequantize

HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4, 2, 16, 24, 40


def write_folder(path: Path, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path / "model.safetensors")
    return path


def weight(name: str, *shape: int) -> np.ndarray:
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return (1 + 0.3 * noise if len(shape) == 1 else 1.5 * noise / np.sqrt(shape[-1])).astype(np.float32)


def chosen_ids(vocab: int) -> np.ndarray:
    """The target's tokens that the draft knows, ascending."""
    return np.sort(np.random.RandomState(3).permutation(vocab)[:VOCAB]).astype(np.int64)


def tensors(
    hidden: int, vocab: int, target: int, taps: int = 3, layer: str = "midlayer", own: bool = False, qwen3: bool = False
) -> dict[str, np.ndarray]:
    """Those of a draft of `hidden` channels for a target of `target`; own: with an embedding."""
    H, K, D = HEADS, KV_HEADS, HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, taps * target), "norm": (hidden,), "lm_head": (VOCAB, hidden)}
    shapes |= {f"{layer}.self_attn.{n}_proj": (h * D, 2 * hidden) for n, h in (("q", H), ("k", K), ("v", K))}
    shapes |= {f"{layer}.{n}": (hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"{layer}.mlp.{n}_proj": (FFN, hidden) for n in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj": (hidden, FFN), f"{layer}.self_attn.o_proj": (hidden, H * D)}
    shapes |= {f"{layer}.self_attn.{n}_norm": (D,) for n in "qk" * qwen3}
    shapes |= {"embed_tokens": (vocab, hidden)} if own else {}
    ids = chosen_ids(vocab)
    known = np.zeros(vocab, bool)
    known[ids] = True
    maps = {"d2t": ids - np.arange(VOCAB), "t2d": known}
    return {f"{name}.weight": weight(name, *shape) for name, shape in shapes.items()} | maps


def config(hidden: int, vocab: int, taps: Sequence[int], **changes: Any) -> dict[str, Any]:
    """In SpecForge's form; `taps` are the layers whose output is read."""
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": VOCAB,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
    } | changes
    return {key: value for key, value in values.items() if value is not None}


def write(folder: Path, hidden: int, vocab: int, taps: Sequence[int], **changes: Any) -> Path:
    """For a target of the same hidden size."""
    return write_folder(folder, config(hidden, vocab, taps, **changes), tensors(hidden, vocab, hidden, len(taps)))


def write_speculators(folder: Path, hidden: int, vocab: int, target: int, taps: Sequence[int], **flags: Any) -> Path:
    """In the form of speculators, with a Qwen3 layer and an embedding; `flags` go beside them."""
    flat = config(hidden, vocab, taps, model_type="qwen3", eagle_config=None, draft_vocab_size=None)
    flat["rope_parameters"] = {"rope_type": "default", "rope_theta": flat.pop("rope_theta")}
    outer = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VOCAB,
        "target_hidden_size": target,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in taps],
        "transformer_layer_config": flat,
    }
    arrays = tensors(hidden, vocab, target, len(taps), "layers.0", own=True, qwen3=True)
    if flags.get("fc_norm"):
        arrays |= {f"fc_norm.{i}.weight": weight(f"fc_norm.{i}", target) for i in range(len(taps))}
    if flags.get("norm_before_fc"):
        arrays["input_norm.weight"] = weight("input_norm", len(taps) * target)
    return write_folder(folder, outer | flags, arrays)


def write_bigrams(path: Path) -> Path:
    """A target whose next token follows from the newest alone: its layers add nothing to the embedding.

    All rows of the embedding have a first number of 1 and a root mean square of 1.
    """

    source = tiny.checkpoint("llama-untied")
    arrays = {name: dequantize(tensor) for name, tensor in source.tensors.items()}
    arrays |= {n: np.zeros_like(a) for n, a in arrays.items() if n.endswith(("o_proj.weight", "down_proj.weight"))}
    table = weight("table", *arrays["model.embed_tokens.weight"].shape)
    table *= np.sqrt((table.shape[1] - 1) / (table[:, 1:] ** 2).sum(-1, keepdims=True))
    table[:, 0] = 1
    arrays |= {"model.embed_tokens.weight": table, "lm_head.weight": weight("head", *table.shape)}
    return write_folder(path, source.config, arrays)


def write_agreeing(path: Path, target: Path, ids: np.ndarray) -> Path:
    """A draft that computes the logits of `write_bigrams`, for the target's tokens `ids`.

    Its attention copies a row's own embedding: keys and queries are all equal, but for rope, and meet best at a
    distance of 0. The norm of the hidden state makes it 0.
    """
    stored = open_checkpoint(target).tensors
    head, norm = (dequantize(stored[name]) for name in ("lm_head.weight", "model.norm.weight"))
    vocab, hidden = head.shape
    q = np.zeros((hidden // HEAD_DIM, HEAD_DIM, 2 * hidden), np.float32)
    q[:, : HEAD_DIM // 2, 0] = 40
    arrays = tensors(hidden, vocab, hidden)
    arrays |= {f"midlayer.self_attn.{n}_proj.weight": q.reshape(-1, 2 * hidden) for n in "qk"}
    arrays["midlayer.self_attn.v_proj.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
    arrays["midlayer.self_attn.o_proj.weight"] = np.eye(hidden, dtype=np.float32)
    arrays["midlayer.mlp.down_proj.weight"] = np.zeros((hidden, FFN), np.float32)
    arrays["midlayer.input_layernorm.weight"] = np.ones(hidden, np.float32)
    arrays["midlayer.hidden_norm.weight"] = np.zeros(hidden, np.float32)
    arrays |= {"norm.weight": norm, "lm_head.weight": head[ids], "d2t": ids - np.arange(len(ids))}
    arrays["t2d"] = np.isin(np.arange(vocab), ids)
    heads = {"num_attention_heads": hidden // HEAD_DIM, "num_key_value_heads": hidden // HEAD_DIM}
    values = config(hidden, vocab, [0, 1, 1], norm_before_residual=True, draft_vocab_size=len(ids), **heads)
    return write_folder(path, values, arrays)


def golden_drafts(folder: Path) -> dict[str, Path]:
    """Those of tests/data/make_eagle3_golden.py: one of each kind of layer and norm."""
    residual = {"norm_before_residual": True}
    fused = write_speculators(folder / "fused", 48, 96, 32, [0, 1, 2], norm_before_fc=True, **residual)
    flags = {"fc_norm": True, "norm_output": True, **residual}
    return {
        "llama": write(folder / "llama", 32, 96, [0, 1, 2]),
        "qwen3": write_speculators(folder / "qwen3", 48, 96, 32, [0, 1, 2], **flags),
        "fused": fused,
    }


def golden_inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (13, 96), the target's embedding (96, 32), and a text (16,) of which three tokens follow the past."""
    random = np.random.RandomState(5)
    return random.standard_normal((13, 96)), random.standard_normal((96, 32)), random.randint(0, 96, 16)


# -- the formula -------------------------------------------------------------------------------------------------------


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def turned(x: np.ndarray) -> np.ndarray:
    """Rope of x (T, heads, D) at the positions 0 to T - 1, base 10,000."""
    n = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(n) / n)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([x[..., :n] * c - x[..., n:] * s, x[..., n:] * c + x[..., :n] * s], -1)


def expected(folder: Path, features: np.ndarray, table: np.ndarray, text: Sequence[int], drafts: int) -> np.ndarray:
    """The logits (drafts, VOCAB) of tokens after `text`, whose last ones from len(features) on follow the past.

    features  (n, taps x hidden of the target), of the tokens before those
    table     the target's embedding
    drafts    of the last tokens of `text`: row i - 1 is drafted after i of these
    """
    stored = open_checkpoint(folder).tensors
    w = {n.removesuffix(".weight"): dequantize(t).astype(np.float64) for n, t in stored.items() if n.endswith("weight")}
    values = json.loads((folder / "config.json").read_text())
    layer = "midlayer." if any(n.startswith("midlayer.") for n in w) else "layers.0."
    at = {n.removeprefix(layer): value for n, value in w.items() if n.startswith(layer)}
    if values.get("norm_before_fc"):
        features = rms(features, w["input_norm"])
    if values.get("fc_norm"):
        parts = np.split(features, len([n for n in w if n.startswith("fc_norm")]), axis=-1)
        features = np.concatenate([rms(part, w[f"fc_norm.{i}"]) for i, part in enumerate(parts)], -1)
    hidden = features @ w["fc"].T
    embedded = w.get("embed_tokens", table)[np.asarray(text)]
    window = values.get("sliding_window") if values.get("layer_types") == ["sliding_attention"] else None
    logits, past = [], len(features)
    for n in range(1, drafts + 1):
        T = past + n
        before = np.concatenate([np.zeros((1, hidden.shape[1])), hidden])[:T]
        normed = rms(before, at["hidden_norm"])
        both = np.concatenate([rms(embedded[:T], at["input_layernorm"]), normed], -1)
        q, k, v = (
            (both @ at[f"self_attn.{name}_proj"].T).reshape(T, heads, HEAD_DIM)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        if "self_attn.q_norm" in at:
            q, k = rms(q, at["self_attn.q_norm"]), rms(k, at["self_attn.k_norm"])
        q, k = turned(q), turned(k)
        out, places = np.zeros((T, HEADS, HEAD_DIM)), np.arange(T)
        for t in range(T):
            seen = (places <= t) & (places > t - (window or T + 1))
            for head in range(HEADS):
                score = k[seen, head * KV_HEADS // HEADS] @ q[t, head] / np.sqrt(HEAD_DIM)
                p = np.exp(score - score.max())
                out[t, head] = p / p.sum() @ v[seen, head * KV_HEADS // HEADS]
        x = (normed if values.get("norm_before_residual") else before) + out.reshape(T, -1) @ at["self_attn.o_proj"].T
        r = rms(x, at["post_attention_layernorm"])
        gate = r @ at["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (r @ at["mlp.up_proj"].T)) @ at["mlp.down_proj"].T
        last = rms(x[-1:], w["norm"])
        logits.append(last[0] @ w["lm_head"].T)
        hidden = np.concatenate([hidden, last if values.get("norm_output") else x[-1:]])
    return np.stack(logits)
