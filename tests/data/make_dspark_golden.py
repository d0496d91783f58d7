"""Write tests/data/models/dspark/: a tiny random draft for the tiny qwen35 model, with the published code's drafts.

The code is github.com/deepseek-ai/DeepSpec (afdfa7c), on PYTHONPATH beside torch and transformers; the hidden states
are transformers'; float32 on stored BF16 values. golden.npz holds, for the first tokens of qwen35's golden ids as text:

anchors  (6,) places where a block starts
logits   (6, 4, 96) float32 of the rows of each block, before the bias by the token before
tokens   (6, 4) the greedy draft
biased   (6, 4, 96) float32, the logits that the greedy draft was chosen from
"""

import json
from pathlib import Path

import numpy as np
import torch
from deepspec.modeling.dspark.common import extract_context_feature
from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

HERE = Path(__file__).parent / "models"
CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
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
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": 8,
    "block_size": 4,
    "mask_token_id": 1,
    "target_layer_ids": [1, 4, 6],
    "num_anchors": 8,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
ANCHORS = (1, 7, 8, 9, 20, 40)


@torch.no_grad()
def main() -> None:
    generator = torch.Generator().manual_seed(6)
    draft = Qwen3DSparkModel(Qwen3Config(**{key: value for key, value in CONFIG.items() if key != "dtype"})).eval()
    draft.config._attn_implementation = "sdpa"
    for p in draft.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(((1 + 0.3 * noise) if p.ndim == 1 else 1.2 * noise / p.shape[-1] ** 0.5).bfloat16())
    target = AutoModelForCausalLM.from_pretrained(HERE / "qwen35", dtype=torch.float32).eval()
    draft.initialize_embeddings_and_head(
        embed_tokens=target.get_input_embeddings(), lm_head=target.get_output_embeddings()
    )
    ids = torch.tensor(np.load(HERE / "qwen35" / "golden.npz")["ids"].astype(np.int64)[: max(ANCHORS) + 1])
    hidden = target(ids[None], output_hidden_states=True).hidden_states
    features = extract_context_feature(hidden, draft.target_layer_ids)
    logits, tokens, biased = [], [], []
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
    folder = HERE / "dspark"
    folder.mkdir(exist_ok=True)
    weights = {name: value.bfloat16().contiguous() for name, value in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    arrays = {"logits": logits, "tokens": tokens, "biased": biased}
    stacked = {name: np.stack(each) for name, each in arrays.items()}
    np.savez_compressed(folder / "golden.npz", anchors=np.array(ANCHORS), **stacked)


if __name__ == "__main__":
    main()
