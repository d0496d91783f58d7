"""Write tests/data/models/mtp-*/: a random multi-token-prediction block for a tiny target, with logits of its drafts.

The layers, of target and block, are transformers'; what lies around the block's layer follows vLLM's
`Qwen3_5MultiTokenPredictor` and `Glm4MoeLiteMultiTokenPredictorLayer`: fc over the normed embedding of a token and the
normed hidden state, after the target's last norm, of the token before it; then the layer, a norm, the target's head.
The first token's hidden state is zero, as llama.cpp has it. float32 on stored BF16 values. golden.npz holds, for the
first tokens of the target's golden ids as text:

anchors  (4,) places where a draft starts
logits   (4, 3, vocab) float32 after one to three tokens of the text from there; of the second and third the block's own
         output at the token before stands for the hidden state
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Glm4MoeLiteModel, Glm4MoeModel, Qwen3_5MoeTextModel, Qwen3_5TextModel

HERE = Path(__file__).parent / "models"
ANCHORS, DEPTH = (1, 7, 20, 40), 3
QWEN = ("mtp.layers.0.", "mtp.norm", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
GLM = "model.layers.3."
KINDS: dict[str, Any] = {  # what a target's block is made of, and what its tensors are called
    "qwen35": (Qwen3_5TextModel, {"layer_types": ["full_attention"]}, QWEN),
    "qwen35moe": (Qwen3_5MoeTextModel, {"layer_types": ["full_attention"]}, QWEN),
    "glm": (
        Glm4MoeLiteModel,
        {"mlp_layer_types": ["sparse"]},
        (GLM, *(GLM + name for name in ("shared_head.norm", "eh_proj", "enorm", "hnorm"))),
    ),
    "glm4moe": (
        Glm4MoeModel,
        {"first_k_dense_replace": 0},
        (GLM, *(GLM + name for name in ("shared_head.norm", "eh_proj", "enorm", "hnorm"))),
    ),
}


def random(name: str, shape: torch.Size, around: float, generator: torch.Generator) -> torch.Tensor:
    """Numbers that no layer is indifferent to; a vector's lie around `around`."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise
    return around + 0.3 * noise if len(shape) == 1 else (1.2 * noise / shape[-1] ** 0.5).bfloat16().float()


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts under names of their own, as published files have them."""
    out = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if part == "gate_up_proj" else [("down", matrix)]
            out |= {f"{prefix}.experts.{e}.{kind}_proj.weight": half for kind, half in parts}
    return out


@torch.no_grad()
def make(target_name: str, seed: int) -> None:
    cls, changes, (layer, norm, fc_name, *norm_names) = KINDS[target_name]
    target = AutoModelForCausalLM.from_pretrained(HERE / target_name, dtype=torch.float32).eval()
    config = target.config.__class__(**(target.config.to_dict() | {"num_hidden_layers": 1} | changes))
    block, generator = cls(config).float().eval(), torch.Generator().manual_seed(seed)
    around = 1.0 if target_name.startswith("glm") else 0.0  # Qwen3.5 stores norm weights around 0
    hidden, tensors = config.hidden_size, dict[str, torch.Tensor]()
    for name, p in (*block.layers.named_parameters(), *block.layers.named_buffers()):
        p.copy_(random(name, p.shape, around, generator))
        tensors[layer + name.removeprefix("0.")] = p
    block.norm.weight.copy_(random(norm, block.norm.weight.shape, around, generator))
    fc = random(fc_name, torch.Size((hidden, 2 * hidden)), 0.0, generator)
    norms = [random(name, torch.Size((hidden,)), around, generator) for name in norm_names]
    top = {norm: block.norm.weight, fc_name: fc} | dict(zip(norm_names, norms, strict=True))
    tensors |= {f"{name}.weight": tensor for name, tensor in top.items()}

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * (weight + 1 - around)

    ids = torch.tensor(np.load(HERE / target_name / "golden.npz")["ids"].astype(np.int64)[: max(ANCHORS) + DEPTH])
    of_target = target.model(ids[None]).last_hidden_state[0]
    embedding = normed(target.get_input_embeddings()(ids), norms[0])
    logits = []
    for anchor in ANCHORS:
        before = torch.cat([torch.zeros(1, hidden), of_target[:anchor]])  # of the tokens 0 to anchor
        for depth in range(DEPTH):
            x = torch.cat([embedding[: anchor + depth + 1], normed(before, norms[1])], dim=-1) @ fc.T
            out = block(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            logits.append(target.lm_head(out[-1]))
            before = torch.cat([before, out[-1:]])
    folder = HERE / f"mtp-{target_name}"
    folder.mkdir(exist_ok=True)
    stored = {n: (t.bfloat16() if t.ndim > 1 else t).contiguous() for n, t in apart(tensors).items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((HERE / target_name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    shaped = torch.stack(logits).reshape(len(ANCHORS), DEPTH, -1).numpy()
    np.savez_compressed(folder / "golden.npz", anchors=np.array(ANCHORS), logits=shaped)
    print(f"{target_name:10} logit std {shaped.std():.2f}, {len(stored)} tensors: {', '.join(sorted(stored))}")


if __name__ == "__main__":
    for seed, name in enumerate(KINDS):
        make(name, seed)
