"""Write tests/data/models/dspark/: a tiny random draft for the tiny qwen35 model, with the published code's drafts.

The code is github.com/deepseek-ai/DeepSpec (afdfa7c), on PYTHONPATH beside torch and transformers; the hidden states
are transformers'; float32 on stored BF16 values. golden.npz holds, for the first tokens of qwen35's golden ids as text:

anchors  (6,) places where a block starts
logits   (6, 4, 96) float32 of the rows of each block, before the bias by the token before
tokens   (6, 4) the greedy draft
biased   (6, 4, 96) float32, the logits that the greedy draft was chosen from
"""

import numpy as np
import torch
from block_drafts import ANCHORS, CONFIG, random_draft, target_rows, write
from deepspec.modeling.dspark.common import extract_context_feature
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

DSPARK = CONFIG | {
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["full_attention"] * 2,
    "block_size": 4,
    "mask_token_id": 1,
    "target_layer_ids": [1, 4, 6],
    "num_anchors": 8,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}


@torch.no_grad()
def main() -> None:
    draft = random_draft(Qwen3DSparkModel, DSPARK, 6)
    draft.config._attn_implementation = "sdpa"
    target, ids, hidden = target_rows()
    draft.initialize_embeddings_and_head(
        embed_tokens=target.get_input_embeddings(), lm_head=target.get_output_embeddings()
    )
    features = extract_context_feature(hidden, draft.target_layer_ids)
    logits, tokens, biased = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for anchor in ANCHORS:
        block = torch.full((1, draft.block_size), draft.mask_token_id)
        block[0, 0] = ids[anchor]
        rows = draft._forward_backbone(
            position_ids=torch.arange(anchor + draft.block_size)[None],
            noise_embedding=draft.embed_tokens(block),
            target_hidden_states=features[:, :anchor],
            is_causal=False,
        )
        base = draft.compute_logits(rows)
        chosen, chosen_from = draft.sample_draft_tokens(base, first_prev_token_ids=block[:, 0], hidden_states=rows)
        for each, values in zip((logits, tokens, biased), (base, chosen, chosen_from), strict=True):
            each.append(values[0].numpy())
    write("dspark", draft, DSPARK, logits=logits, tokens=tokens, biased=biased)


if __name__ == "__main__":
    main()
