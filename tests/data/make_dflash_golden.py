"""Write tests/data/models/dflash/ and dflash2/: tiny random drafts for the tiny qwen35 model, with published results.

The library is `dflash` 0.1.0 on PyPI (pip install --no-deps dflash, beside torch and transformers); the hidden states
are transformers'; float32 on stored BF16 values. The tapped layers are listed out of order, as a draft may list them.
golden.npz holds, for the first tokens of qwen35's golden ids as text:

anchors  (6,) places where a block starts, around the window of 8
logits   (6, 4, 96) float32 of the four masked rows of each block
tokens   (6, 4) of DFlash2, the greedy draft
"""

from typing import Any

import numpy as np
import torch
from block_drafts import ANCHORS, CONFIG, random_draft, target_rows, write
from dflash.model import DFlash2DraftModel, DFlashDraftModel, extract_context_feature

WINDOWED = CONFIG | {"use_sliding_window": True, "sliding_window": 8, "tie_word_embeddings": True}
DFLASH = WINDOWED | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [4, 1, 6]},
}
DFLASH2 = WINDOWED | {
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


@torch.no_grad()
def make(name: str, kind: type[DFlashDraftModel], config: dict[str, Any], seed: int) -> None:
    draft = random_draft(kind, config, seed)
    target, ids, hidden = target_rows()
    features = extract_context_feature(hidden, draft.target_layer_ids)
    head, logits, tokens = target.get_output_embeddings(), list[np.ndarray](), list[np.ndarray]()
    for anchor in ANCHORS:
        block = torch.full((1, draft.block_size), draft.mask_token_id)
        block[0, 0] = ids[anchor]
        rows = draft(
            position_ids=torch.arange(anchor + draft.block_size)[None],
            noise_embedding=target.get_input_embeddings()(block),
            target_hidden=features[:, :anchor],
        )
        logits.append(draft.compute_logits(rows, head)[0, 1:].numpy())
        if kind is DFlash2DraftModel:
            tokens.append(draft.propose(rows[:, 1:], block[:, 0], head, 0.0)[0][0].numpy())
    write(name, draft, config, logits=logits, **({"tokens": tokens} if tokens else {}))


if __name__ == "__main__":
    make("dflash", DFlashDraftModel, DFLASH, 5)
    make("dflash2", DFlash2DraftModel, DFLASH2, 7)
