"""What the scripts of block drafts share: their tiny configuration, random weights, the target's rows, and the files.

A draft is for the tiny qwen35 model; a block begins at each of ANCHORS in the text of qwen35's golden ids. Needs torch
and transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

HERE = Path(__file__).parent / "models"
ANCHORS = (1, 7, 8, 9, 20, 40)
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "num_target_layers": 8,
    "dtype": "bfloat16",
}


def random_draft(kind: type[torch.nn.Module], config: dict[str, Any], seed: int) -> Any:
    """A draft of `kind` with random weights that BF16 holds, in float32."""
    generator = torch.Generator().manual_seed(seed)
    draft = kind(Qwen3Config(**{key: value for key, value in config.items() if key != "dtype"})).eval()
    with torch.no_grad():
        for p in draft.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(((1 + 0.3 * noise) if p.ndim == 1 else 1.2 * noise / p.shape[-1] ** 0.5).bfloat16())
    return draft


def target_rows() -> tuple[Any, torch.Tensor, Any]:
    """The tiny target in float32, its text up to the last anchor (T,), and the hidden states of all layers."""
    target = AutoModelForCausalLM.from_pretrained(HERE / "qwen35", dtype=torch.float32).eval()
    ids = torch.tensor(np.load(HERE / "qwen35" / "golden.npz")["ids"].astype(np.int64)[: max(ANCHORS) + 1])
    with torch.no_grad():
        return target, ids, target(ids[None], output_hidden_states=True).hidden_states


def write(name: str, draft: Any, config: dict[str, Any], **golden: list[np.ndarray]) -> None:
    """Write the draft's folder, and golden.npz of one array per anchor under each name."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    weights = {_stored(name): value.bfloat16().contiguous() for name, value in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    arrays = {name: np.stack(each) for name, each in golden.items()}
    np.savez_compressed(folder / "golden.npz", anchors=np.array(ANCHORS), **arrays)


def _stored(name: str) -> str:
    """The name under which DFlash2DraftModel.from_pretrained looks for a parameter."""
    return name.removesuffix(".weight") if name.endswith("codebook.weight") else name
