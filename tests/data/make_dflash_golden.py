"""Write tests/data/models/dflash/ and dflash2/: tiny random drafts for the tiny qwen35 model, with published results.

The library is `dflash` 0.1.0 on PyPI (pip install --no-deps dflash, beside torch and transformers); the hidden states
are transformers'; float32 on stored BF16 values. The tapped layers are listed out of order, as a draft may list them.
golden.npz holds, for the first tokens of qwen35's golden ids as text:

anchors  (6,) places where a block starts, around the window of 8
logits   (6, 4, 96) float32 of the four masked rows of each block
tokens   (6, 4) of DFlash2, the greedy draft
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, extract_context_feature
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

HERE = Path(__file__).parent / "models"
CONFIG = {
    "architectures": ["DFlashDraftModel"],
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
    "block_size": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [4, 1, 6]},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
DFLASH2 = CONFIG | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "dflash_config": {
        "block_size": 5,
        "conv_group_size": 4,
        "conv_kernel_size": 2,
        "mask_token_id": 1,
        "selector_rank": 8,
        "selector_top_k": 6,
        "target_layer_ids": [1, 4, 6],
    },
}
DFLASH2.pop("block_size")
ANCHORS = (1, 7, 8, 9, 20, 40)


@torch.no_grad()
def write(name: str, kind: type[DFlashDraftModel], config: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draft = kind(Qwen3Config(**{key: value for key, value in config.items() if key != "dtype"})).eval()
    for p in draft.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(((1 + 0.3 * noise) if p.ndim == 1 else 1.2 * noise / p.shape[-1] ** 0.5).bfloat16())
    target = AutoModelForCausalLM.from_pretrained(HERE / "qwen35", dtype=torch.float32).eval()
    ids = torch.tensor(np.load(HERE / "qwen35" / "golden.npz")["ids"].astype(np.int64)[: max(ANCHORS) + 1])
    hidden = target(ids[None], output_hidden_states=True).hidden_states
    features = extract_context_feature(hidden, draft.target_layer_ids)
    head, logits, tokens = target.get_output_embeddings(), [], []
    for anchor in ANCHORS:
        block = torch.full((1, draft.block_size), draft.mask_token_id)
        block[0, 0] = ids[anchor]
        rows = draft(
            position_ids=torch.arange(anchor + draft.block_size)[None],
            noise_embedding=target.get_input_embeddings()(block),
            target_hidden=features[:, :anchor],
        )
        logits.append(draft.compute_logits(rows, head)[0, 1:])
        if kind is DFlash2DraftModel:
            tokens.append(draft.propose(rows[:, 1:], block[:, 0], head, 0.0)[0][0].numpy())
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    weights = {_stored(name): value.bfloat16().contiguous() for name, value in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    drafts = {"tokens": np.stack(tokens)} if tokens else {}
    np.savez_compressed(folder / "golden.npz", anchors=np.array(ANCHORS), logits=torch.stack(logits).numpy(), **drafts)


def _stored(name: str) -> str:
    """The name under which DFlash2DraftModel.from_pretrained looks for a parameter."""
    return name.removesuffix(".weight") if name.endswith("codebook.weight") else name


if __name__ == "__main__":
    write("dflash", DFlashDraftModel, CONFIG, 5)
    write("dflash2", DFlash2DraftModel, DFLASH2, 7)
