"""Write tests/data/eagle3_golden.npz: logits of tests/tiny_eagle.py's drafts, by the published code.

The layers are those of speculators 0.9.0 (pip install --no-deps speculators, beside torch and transformers), in
float64; what lies around them follows its `Eagle3DraftModel`. The first row has a hidden state of zeros. By the name of
a draft:

(3, 40) float32 logits after one to three tokens that follow the features; of the second and third the layer's own
        output at the token before stands for the hidden state

PYTHONPATH=.:tests python tests/data/make_eagle3_golden.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import tiny_eagle
import torch
from safetensors.torch import load_file
from speculators.models.eagle3.model_definitions import LlamaDecoderEagle3FirstLayer, Qwen3DecoderEagle3FirstLayer
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

KINDS = {"llama": (LlamaConfig, LlamaDecoderEagle3FirstLayer), "qwen3": (Qwen3Config, Qwen3DecoderEagle3FirstLayer)}


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(len(weight), eps=1e-6)
    norm.weight.copy_(weight)
    return norm(x)


@torch.no_grad()
def logits_of(folder: Path) -> np.ndarray:
    stored = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    values = json.loads((folder / "config.json").read_text())
    inner = values.get("transformer_layer_config", values)
    config_class, layer_class = KINDS[inner["model_type"]]
    config = config_class(**{k: v for k, v in inner.items() if k not in ("architectures", "eagle_config")})
    config._attn_implementation = "eager"
    layer, rope = layer_class(config, 0, values.get("norm_before_residual", False)), LlamaRotaryEmbedding(config)
    prefixes = "midlayer.", "layers.0."
    layer.load_state_dict({n.removeprefix(p): t for n, t in stored.items() for p in prefixes if n.startswith(p)})

    features, table, text = (torch.tensor(each) for each in tiny_eagle.golden_inputs())
    if values.get("norm_before_fc"):
        features = normed(features, stored["input_norm.weight"])
    if values.get("fc_norm"):
        parts = enumerate(features.chunk(3, -1))
        features = torch.cat([normed(part, stored[f"fc_norm.{i}.weight"]) for i, part in parts], -1)
    hidden, logits = features @ stored["fc.weight"].T, []
    embedded = stored.get("embed_tokens.weight", table)[text]
    for rows in range(len(features) + 1, len(text) + 1):
        before = torch.cat([torch.zeros(1, hidden.shape[1]), hidden])[:rows]
        x, places = torch.cat([embedded[:rows], before], -1)[None], torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        out = layer(x, attention_mask=mask, position_ids=places, position_embeddings=rope(x, places))
        last = out[:, -1]
        logits.append(normed(last, stored["norm.weight"])[0] @ stored["lm_head.weight"].T)
        hidden = torch.cat([hidden, normed(last, stored["norm.weight"]) if values.get("norm_output") else last])
    return torch.stack(logits).numpy().astype(np.float32)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as made:
        golden = {name: logits_of(folder) for name, folder in tiny_eagle.golden_drafts(Path(made)).items()}
    np.savez_compressed(Path(__file__).parent / "eagle3_golden.npz", **golden)
    print({name: (rows.shape, float(rows.std())) for name, rows in golden.items()})
