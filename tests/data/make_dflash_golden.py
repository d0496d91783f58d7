"""Write tests/data/models/dflash/: a tiny random draft for the tiny qwen35 model, with the logits of its PyTorch form.

The form is that of examples/train/draft.py, and the hidden states are transformers'; float32 on stored BF16 values.
golden.npz holds, for the first tokens of qwen35's golden ids as text:

anchors  (6,) places where a block starts, around the window of 8
logits   (6, 4, 96) float32 of the four masked rows of each block
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent / "models"
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train"))

from draft import Draft, DraftConfig  # noqa: E402
from target import Config  # noqa: E402

CONFIG = DraftConfig(
    hidden=32, ffn=40, heads=4, kv_heads=2, head_dim=16, sliding=(True, False), window=8, block=5, taps=(1, 4, 6)
)
ANCHORS = (1, 7, 8, 9, 20, 40)


@torch.no_grad()
def main() -> None:
    generator = torch.Generator().manual_seed(5)
    draft = Draft(CONFIG)
    for p in draft.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(((1 + 0.3 * noise) if p.ndim == 1 else 1.2 * noise / p.shape[-1] ** 0.5).bfloat16())
    target = AutoModelForCausalLM.from_pretrained(HERE / "qwen35", dtype=torch.float32).eval()
    ids = torch.tensor(np.load(HERE / "qwen35" / "golden.npz")["ids"].astype(np.int64)[: max(ANCHORS) + 1])
    hidden = target(ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i + 1] for i in CONFIG.taps], -1)
    anchors = torch.tensor([ANCHORS])
    blocks = torch.full((1, len(ANCHORS), CONFIG.block), 1)
    blocks[0, :, 0] = ids[anchors[0]]
    rows = draft(features, target.get_input_embeddings()(blocks), anchors)
    folder = HERE / "dflash"
    folder.mkdir(exist_ok=True)
    save_file({k: v.bfloat16() for k, v in draft.state_dict().items()}, folder / "model.safetensors", {"format": "pt"})
    values = CONFIG.hugging_face(Config(vocab=96, layers=8, context=1024))
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    logits = target.get_output_embeddings()(rows[0, :, 1:])
    np.savez_compressed(folder / "golden.npz", anchors=np.array(ANCHORS), logits=logits.numpy())


if __name__ == "__main__":
    main()
