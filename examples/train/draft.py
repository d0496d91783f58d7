"""The DFlash draft (arXiv 2602.06036): a block of tokens in one pass, from hidden states of the target.

Parameters are named as in the published drafts; norms are plain. Embedding and head are the target's own. Sliding
layers see the newest `window` positions before the block and are causal inside it; the full layer sees everything.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from target import MLP, Config, Linear, Norm, Target, rope
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

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

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        c = self.c
        both = torch.cat([context, x], 1)
        before = torch.arange(context.shape[1], device=x.device).expand(len(x), -1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (c.heads, c.head_dim)))
        k = self.k_norm(self.k_proj(both).unflatten(-1, (c.kv_heads, c.head_dim)))
        v = self.v_proj(both).unflatten(-1, (c.kv_heads, c.head_dim))
        q = rope(q, positions, c.head_dim, c.theta)
        k = rope(k, torch.cat([before, positions], 1), c.head_dim, c.theta)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(c.heads // c.kv_heads, 1) for y in (k, v))
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.o_proj(o.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.eps, centre=0.0)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = Norm(c.hidden, c.eps, centre=0.0)
        self.mlp = MLP(c.hidden, c.ffn)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.c = c
        self.fc = Linear(len(c.taps) * c.hidden, c.hidden)
        self.hidden_norm, self.norm = Norm(c.hidden, c.eps, centre=0.0), Norm(c.hidden, c.eps, centre=0.0)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in c.sliding)

    def masks(self, anchors: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """What block rows may see, for full and for sliding layers: bool (B, n·block, length + n·block)."""
        block = self.c.block
        at = anchors.repeat_interleave(block, 1)[..., None]
        place = torch.arange(length, device=anchors.device)
        row = torch.arange(at.shape[1], device=anchors.device)
        same = (row[:, None] // block == row // block).expand(len(anchors), -1, -1)
        earlier = same & (row <= row[:, None])
        full = torch.cat([place < at, same], -1)
        sliding = torch.cat([(place < at) & (place >= at - self.c.window), earlier], -1)
        return full, sliding

    def forward(self, features: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Normed rows (B, n, block, hidden) of blocks that start at `anchors` (B, n).

        features (B, T, taps·hidden) of the target; embedded (B, n, block, hidden): the known token, then masks.
        """
        context = self.hidden_norm(self.fc(features))
        positions = (anchors[..., None] + torch.arange(self.c.block, device=anchors.device)).flatten(1)
        full, sliding = self.masks(anchors, features.shape[1])
        x = embedded.flatten(1, 2)
        for layer, slides in zip(self.layers, self.c.sliding, strict=True):
            x = layer(x, context, positions, sliding if slides else full)
        return self.norm(x).view_as(embedded)


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
