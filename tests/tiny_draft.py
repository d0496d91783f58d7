"""A random DFlash draft for a tiny target, as a safetensors folder of z-lab's layout."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from common.kv_cache import CacheOptions
from common.models import Model
from common.models.drafts import load_pair
from common.models.pair import Pair

HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 4, 2, 16, 24, 2


def write(
    folder: Path,
    hidden: int,
    vocab: int,
    target_layers: int,
    taps: Sequence[int],
    laguna: bool = False,
    head_dim: int = HEAD_DIM,
    **config: Any,
) -> Path:
    """Write the draft; laguna in the form of Laguna's drafts, with q, k and v in one matrix."""

    def weight(name: str, *shape: int) -> np.ndarray:
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        return (1 + 0.3 * noise if len(shape) == 1 else noise / np.sqrt(shape[-1])).astype(np.float32)

    shapes: dict[str, tuple[int, ...]]
    shapes = {"fc": (hidden, len(taps) * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]]
        layer = {"self_attn.q_proj": (HEADS * head_dim, hidden), "self_attn.o_proj": (hidden, HEADS * head_dim)}
        layer |= {f"self_attn.{name}_proj": (KV_HEADS * head_dim, hidden) for name in "kv"}
        layer |= {f"self_attn.{name}_norm": (head_dim,) for name in "qk"}
        layer |= {"mlp.gate_proj": (FFN, hidden), "mlp.up_proj": (FFN, hidden), "mlp.down_proj": (hidden, FFN)}
        layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        if laguna:
            layer = {name: shape for name, shape in layer.items() if name[-6:] not in ("q_proj", "k_proj", "v_proj")}
            layer["self_attn.qkv_proj"] = ((HEADS + 2 * KV_HEADS) * head_dim, hidden)
            layer["self_attn.g_proj"] = (HEADS, hidden)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if laguna:
        shapes |= {f"aux_hidden_norms.{i}": (hidden,) for i in range(len(taps))}
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "block_size": 5,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": list(taps)},
    }
    if laguna:
        inner = ("block_size", "num_target_layers")
        values["dflash_config"] |= {key: values.pop(key) for key in inner} | {"causal": True}
        values |= {"architectures": ["DFlashLagunaForCausalLM"], "gating": "per-head", "draft_vocab_size": vocab}
        values["layer_types"] = ["sliding_attention"] * LAYERS
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values | config))
    save_file({f"{name}.weight": weight(name, *shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def packed_pair(folder: Path, target: Model, cache: CacheOptions) -> Pair:
    """Pair of `target` and a draft with heads of 64, whose caches are in the formats of `cache`."""
    c, layers = target.config, len(target.layout.layers)
    return packed(load_pair(write(folder, c.hidden, c.vocab, layers, [0, layers - 1], head_dim=64), target), cache)


def packed(pair: Pair, cache: CacheOptions) -> Pair:
    """`pair` with the draft's caches in the formats of `cache`; the target's stay as they are.

    The heads of a tiny target are too small for those formats.
    """
    states = pair.state_spec
    pair = replace(pair, cache=cache)
    vars(pair)["state_spec"] = states
    return pair
