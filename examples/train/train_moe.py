"""Train a small mixture of experts of Laguna's form, and record which experts its router chooses.

    python train_moe.py build/ out/ --steps 1000

Reads what moe_corpus.py wrote; writes out/demo-moe (a Hugging Face folder, bfloat16) and out/demo-moe.routing.npz, the
experts of held-out text, documents in order: ids uint16 (tokens, layers, top_k) and `experts`, how many there are.

The router's bias balances the load without a loss of its own (Wang et al. 2024, arXiv 2408.15664): after each step it
grows for experts that got less than their share.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from optimiser import Optimiser, trapezoid
from safetensors.torch import save_file
from target import Linear, Norm, rope
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, scaled_dot_product_attention, silu, softplus
from train_target import stream, windows

LENGTH, ROWS = 1024, 32  # tokens of a window, and windows of a step
BALANCE = 1e-3  # of the bias, per step
SCALE = 2.0  # of the routed experts' weights
RECORDED = 4096  # held-out tokens


@dataclass(frozen=True)
class Config:
    vocab: int = 11008
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 256
    ffn: int = 768
    experts: int = 64
    top_k: int = 4
    expert_ffn: int = 128
    shared_ffn: int = 128
    theta: float = 500_000.0
    sliding_theta: float = 10_000.0
    eps: float = 1e-6
    context: int = 4096

    def slides(self, layer: int) -> bool:
        return layer % 4 > 0

    def hugging_face(self) -> dict:
        """`config.json` of the exported checkpoint."""
        kinds = ["sliding_attention" if self.slides(i) else "full_attention" for i in range(self.layers)]

        def rope_of(theta: float) -> dict:
            return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0}

        return {
            "architectures": ["LagunaForCausalLM"],
            "model_type": "laguna",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_attention_heads_per_layer": [self.heads] * self.layers,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "layer_types": kinds,
            "mlp_layer_types": ["dense"] + ["sparse"] * (self.layers - 1),
            "sliding_window": self.window,
            "intermediate_size": self.ffn,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_ffn,
            "shared_expert_intermediate_size": self.shared_ffn,
            "moe_routed_scaling_factor": SCALE,
            "moe_router_score_func": "sigmoid",
            "rope_parameters": {
                "full_attention": rope_of(self.theta),
                "sliding_attention": rope_of(self.sliding_theta),
            },
            "gating": "per-head",
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }


class Attention(nn.Module):
    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.c, self.slides = c, c.slides(layer)
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.g_proj = Linear(c.hidden, c.heads)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.eps, 0.0), Norm(c.head_dim, c.eps, 0.0)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        c, at = self.c, torch.arange(x.shape[1], device=x.device)
        theta = c.sliding_theta if self.slides else c.theta
        q = rope(self.q_norm(self.q_proj(x).unflatten(-1, (c.heads, -1))), at, c.head_dim, theta)
        k = rope(self.k_norm(self.k_proj(x).unflatten(-1, (c.kv_heads, -1))), at, c.head_dim, theta)
        q, k, v = (y.transpose(1, 2) for y in (q, k, self.v_proj(x).unflatten(-1, (c.kv_heads, -1))))
        if self.slides:
            o = scaled_dot_product_attention(q, k, v, attn_mask=near, enable_gqa=True)
        else:
            o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gate = softplus(self.g_proj(x).float()).to(x.dtype)
        return self.o_proj((o.transpose(1, 2) * gate[..., None]).flatten(2))


class Ffn(nn.Module):
    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(hidden, ffn), Linear(hidden, ffn), Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Experts as stacked matrices. Every expert sees every token, as dense products: quick enough for small ones."""

    def __init__(self, c: Config):
        super().__init__()
        self.c, self.gate = c, Linear(c.hidden, c.experts)
        scale, F = 0.02, c.expert_ffn
        self.gate_proj = nn.Parameter(torch.randn(c.experts, F, c.hidden) * scale)
        self.up_proj = nn.Parameter(torch.randn(c.experts, F, c.hidden) * scale)
        self.down_proj = nn.Parameter(torch.randn(c.experts, c.hidden, F) * scale)
        self.shared_expert = Ffn(c.hidden, c.shared_ffn)
        self.register_buffer("bias", torch.zeros(c.experts))
        self.register_buffer("load", torch.zeros(c.experts))
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        p = linear(x.float(), self.gate.weight).sigmoid()
        ids = (p + self.bias).topk(self.c.top_k, -1).indices
        weights = p.gather(-1, ids)
        weights = weights * (SCALE / weights.sum(-1, keepdim=True))
        dense = torch.zeros_like(p).scatter(-1, ids, weights).to(x.dtype)  # (rows, tokens, experts)
        if self.training:
            self.load.add_(torch.zeros_like(p).scatter(-1, ids, 1.0).sum((0, 1)))
        else:
            self.chosen = ids
        flat = x.flatten(0, 1)
        gate, up = (torch.einsum("th,efh->etf", flat, w.to(x.dtype)) for w in (self.gate_proj, self.up_proj))
        hidden = silu(gate) * up * dense.flatten(0, 1).T[..., None]
        out = torch.einsum("etf,ehf->th", hidden, self.down_proj.to(x.dtype))
        return out.view_as(x) + self.shared_expert(x)

    @torch.no_grad()
    def balance(self) -> None:
        self.bias += BALANCE * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.eps, 0.0)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = Norm(c.hidden, c.eps, 0.0)
        self.mlp = Mixture(c) if layer else Ffn(c.hidden, c.ffn)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), near)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Parameter(torch.randn(c.vocab, c.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = Norm(c.hidden, c.eps, 0.0)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        T = tokens.shape[1]
        behind = torch.arange(T, device=tokens.device)[:, None] - torch.arange(T, device=tokens.device)
        near = (behind >= 0) & (behind < self.c.window)
        x = embedding(tokens, self.embed_tokens).to(dtype)
        for layer in self.layers:
            x = layer(x, near)
        return linear(self.norm(x), self.embed_tokens.to(dtype))

    @property
    def mixtures(self) -> list[Mixture]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Mixture)]


def loss(model: Model, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Model, held: Tensor) -> tuple[float, np.ndarray]:
    """Bits per token of held-out text, and the experts of its first RECORDED tokens: uint8 (layers, tokens, top_k)."""
    model.eval()
    rows = held[: len(held) // LENGTH * LENGTH].view(-1, LENGTH).long()[:64]
    nats, chosen = 0.0, []
    for i, some in enumerate(rows.split(8)):
        logits = model(some)[:, :-1].float()
        nats += cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten()).item() * len(some)
        if i * 8 * LENGTH < RECORDED:
            chosen.append(torch.stack([m.chosen.flatten(0, 1) for m in model.mixtures]))
    model.train()
    return nats / len(rows) / math.log(2), torch.cat(chosen, 1)[:, :RECORDED].cpu().numpy().astype(np.uint8)


def export(model: Model, build: Path, out: Path) -> None:
    """The Hugging Face folder, experts one by one as transformers names them."""
    folder = out / "demo-moe"
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, value in model.state_dict().items():
        if name.endswith(".load"):
            continue
        where, _, last = name.rpartition(".")
        if value.ndim == 3:
            for i, expert in enumerate(value):
                weights[f"model.{where}.experts.{i}.{last}.weight"] = expert.bfloat16().contiguous()
        elif last == "bias":
            weights[f"model.{where}.gate.e_score_correction_bias"] = value.float()
        else:
            weights[f"model.{name}" + ("" if name.endswith(".weight") else ".weight")] = value.bfloat16().contiguous()
    save_file({name: value.cpu() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.c.hugging_face(), indent=2) + "\n")
    (folder / "tokenizer.json").write_bytes((build / "tokenizer.json").read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=900, help="stops earlier, and cools down before")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    train, held = (stream([args.build / f"{name}.bin"], args.device) for name in ("train", "held"))
    model = Model(Config()).to(args.device)
    compiled = torch.compile(loss, dynamic=False)
    optimiser = Optimiser(model.named_parameters(), lr=0.02, adam_lr=3e-3)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(train):,} tokens", flush=True)
    batches, start, done, step = windows(train, LENGTH, ROWS, seed=1), time.time(), 0.0, 0
    while done < 1:
        value = compiled(model, next(batches))
        value.backward()
        optimiser.step(trapezoid(min(1.0, done + 1 / args.steps)))
        for mixture in model.mixtures:
            mixture.balance()
        step += 1
        done = max(step / args.steps, (time.time() - start) / args.seconds)
        if step % 100 == 0 or step == 10:
            print(f"step {step}: loss {value.item():.4f}, {time.time() - start:.0f} s", flush=True)
    bits, ids = evaluate(model, held)
    counts = np.stack([np.bincount(layer.ravel(), minlength=model.c.experts) for layer in ids])
    again = [np.mean([len(set(a) & set(b)) for a, b in pairwise(layer)]) for layer in ids]
    export(model, args.build, args.out)
    trace = ids.transpose(1, 0, 2).astype(np.uint16)
    np.savez_compressed(args.out / "demo-moe.routing.npz", ids=trace, experts=model.c.experts)
    top = np.sort(counts, axis=1)[:, ::-1].cumsum(axis=1) / counts.sum(axis=1, keepdims=True)
    report = {
        "parameters": size,
        "steps": step,
        "seconds": round(time.time() - start, 1),
        "held-out bits per token": round(bits, 4),
        "share of the busiest 16 experts": [round(float(x), 3) for x in top[:, 15]],
        "experts kept from the token before": [round(float(x), 3) for x in again],
    }
    (args.out / "demo-moe.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
