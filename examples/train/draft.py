"""The DFlash draft (arXiv 2602.06036): a block of tokens in one pass, from hidden states of the target.

Parameters are named as in the published drafts; norms are plain. Embedding and head are the target's own. A row of a
sliding layer sees the newest `window` positions up to its own; the full layer sees everything.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from target import MLP, Config, Linear, Norm, Target, rope
from torch import Tensor, nn

MASK = 1


@dataclass(frozen=True)
class DraftConfig:
    hidden: int = 512
    ffn: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    sliding: tuple[bool, ...] = (True, True, True, False)
    window: int = 256
    block: int = 16
    taps: tuple[int, ...] = (2, 4, 6)
    theta: float = 10_000.0
    eps: float = 1e-6

    def hugging_face(self, target: Config) -> dict:
        """`config.json` of the exported draft."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": target.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": len(self.sliding),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": target.context,
            "block_size": self.block,
            "layer_types": ["sliding_attention" if s else "full_attention" for s in self.sliding],
            "use_sliding_window": True,
            "sliding_window": self.window,
            "num_target_layers": target.layers,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(self.taps)},
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }

    def asdict(self) -> dict:
        return asdict(self)


class DraftAttention(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.eps, centre=0.0), Norm(c.head_dim, c.eps, centre=0.0)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, seen: Tensor, inside: Tensor) -> Tensor:
        """Rows x (B, n, block, hidden) attend to the context (B, T, hidden) where `seen` (B, n, block, T), and to the
        rows of their own block where `inside` (block, block)."""
        c, length = self.c, context.shape[1]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (c.heads, c.head_dim)))
        k, k_before = (self.k_norm(self.k_proj(y).unflatten(-1, (c.kv_heads, c.head_dim))) for y in (x, context))
        v, v_before = (self.v_proj(y).unflatten(-1, (c.kv_heads, c.head_dim)) for y in (x, context))
        positions = anchors[..., None] + torch.arange(c.block, device=x.device)
        q, k = (rope(y, positions, c.head_dim, c.theta) for y in (q, k))
        k_before = rope(k_before, torch.arange(length, device=x.device), c.head_dim, c.theta)
        q = (q * c.head_dim**-0.5).unflatten(3, (c.kv_heads, -1))
        outer = torch.einsum("bnqhgd,bthd->bhgnqt", q, k_before)
        inner = torch.einsum("bnqhgd,bnkhd->bhgnqk", q, k)
        outer = outer.masked_fill(~seen[:, None, None], float("-inf"))
        inner = inner.masked_fill(~inside, float("-inf"))
        weights = torch.cat([outer, inner], -1).float().softmax(-1).to(x.dtype)
        o = torch.einsum("bhgnqt,bthd->bnqhgd", weights[..., :length], v_before)
        o = o + torch.einsum("bhgnqk,bnkhd->bnqhgd", weights[..., length:], v)
        return self.o_proj(o.flatten(3))


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.eps, centre=0.0)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = Norm(c.hidden, c.eps, centre=0.0)
        self.mlp = MLP(c.hidden, c.ffn)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, seen: Tensor, inside: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors, seen, inside)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.c = c
        self.fc = Linear(len(c.taps) * c.hidden, c.hidden)
        self.hidden_norm, self.norm = Norm(c.hidden, c.eps, centre=0.0), Norm(c.hidden, c.eps, centre=0.0)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in c.sliding)

    def forward(self, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Normed rows (B, n, block, hidden) of blocks that start at `anchors` (B, n).

        features (B, T, taps·hidden) of the target; embedded (B, n, block, hidden): the known token, then masks.
        """
        context = self.hidden_norm(self.fc(features))
        place, row = (torch.arange(n, device=anchors.device) for n in (features.shape[1], self.c.block))
        full = (place < anchors[..., None])[:, :, None].expand(-1, -1, self.c.block, -1)
        near = full & (place > (anchors[..., None] + row)[..., None] - self.c.window)
        earlier = (row <= row[:, None]) & (row > row[:, None] - self.c.window)
        x = embedded
        for layer, slides in zip(self.layers, self.c.sliding, strict=True):
            x = layer(x, context, anchors, *((near, earlier) if slides else (full, torch.ones_like(earlier))))
        return self.norm(x)


def block_inputs(target: Target, tokens: Tensor, anchors: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Embedded blocks (B, n, block, hidden): the token at each anchor, then masks."""
    ids = torch.full((*anchors.shape, block), MASK, device=tokens.device)
    ids[..., 0] = tokens.gather(1, anchors)
    return target.embed(ids, dtype)


def load(path: Path, device: str = "cpu") -> Draft:
    saved = torch.load(path, map_location=device)
    draft = Draft(DraftConfig(**saved["config"])).to(device)
    draft.load_state_dict({k: v.float() for k, v in saved["weights"].items()})
    return draft.requires_grad_(False)
