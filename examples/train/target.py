"""The target: a small text model of the Qwen3.5 architecture, its parameters named as in a Hugging Face checkpoint.

Weights are float32; each is cast to the activations' type where it is used, so one model trains in bfloat16 and is
checked in float32. `forward` runs whole sequences, `step` one token per sequence on preallocated states.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gdn import delta_rule
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad, scaled_dot_product_attention, silu, softplus


@dataclass(frozen=True)
class Config:
    vocab: int = 11008
    hidden: int = 512
    layers: int = 8
    ffn: int = 768
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 16
    k_heads: int = 2
    v_heads: int = 4
    state_dim: int = 64
    taps: int = 4
    theta: float = 10_000.0
    context: int = 4096
    eps: float = 1e-6

    def attends(self, layer: int) -> bool:
        return layer % 4 == 3

    def hugging_face(self) -> dict:
        """`config.json` of the exported checkpoint."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "layer_types": ["full_attention" if self.attends(i) else "linear_attention" for i in range(self.layers)],
            "linear_conv_kernel_dim": self.taps,
            "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim,
            "linear_num_key_heads": self.k_heads,
            "linear_num_value_heads": self.v_heads,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.theta,
                "partial_rotary_factor": self.rotary / self.head_dim,
                "mrope_interleaved": True,
                "mrope_section": self.rope_sections(),
            },
            "tie_word_embeddings": True,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }

    def rope_sections(self) -> list[int]:
        pairs = self.rotary // 2
        return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]

    def asdict(self) -> dict:
        return asdict(self)


class Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm; `centre` 1 stores the weight around zero, as this architecture does nearly everywhere."""

    def __init__(self, size: int, eps: float, centre: float = 1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - centre))
        self.eps, self.centre = eps, centre

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (self.centre + self.weight)).to(x.dtype)


def rope(x: Tensor, positions: Tensor, dims: int, theta: float) -> Tensor:
    """Rotates the first `dims` of x (..., T, H, D), pairs (j, j + dims/2), by float32 angles of positions (..., T)."""
    frequency = theta ** (-torch.arange(0, dims, 2, device=x.device, dtype=torch.float32) / dims)
    angle = (positions.float()[..., None] * frequency)[..., None, :]
    a, b, rest = x.float().split([dims // 2, dims // 2, x.shape[-1] - dims], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_proj = Linear(c.hidden, 2 * c.heads * c.head_dim)  # per head: query, then gate
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.eps), Norm(c.head_dim, c.eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = self.c
        q, gate = self.q_proj(x).unflatten(-1, (c.heads, 2 * c.head_dim)).chunk(2, -1)
        k, v = (p(x).unflatten(-1, (c.kv_heads, c.head_dim)) for p in (self.k_proj, self.v_proj))
        q, k = (rope(y, positions, c.rotary, c.theta) for y in (self.q_norm(q), self.k_norm(k)))
        return q, k, v, gate

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, torch.arange(x.shape[1], device=x.device))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.o_proj((o * gate.sigmoid()).flatten(2))

    def new_state(self, batch: int, length: int, like: Tensor) -> list[Tensor]:
        shape = (batch, self.c.kv_heads, length, self.c.head_dim)
        return [like.new_zeros(shape), like.new_zeros(shape)]

    def step(self, x: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v, gate = (y[:, 0] for y in self.project(x[:, None], position))
        keys.index_copy_(2, position, k[:, :, None])
        values.index_copy_(2, position, v[:, :, None])
        q = q.unflatten(1, (self.c.kv_heads, -1))  # the query heads of one KV head, as rows
        mask = (torch.arange(keys.shape[2], device=x.device) <= position)[None, None, None]
        o = scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.o_proj((o.flatten(1, 2) * gate.sigmoid()).flatten(1))


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.inner, self.channels = c.v_heads * c.state_dim, (2 * c.k_heads + c.v_heads) * c.state_dim
        self.in_proj_qkv = Linear(c.hidden, self.channels)
        self.in_proj_z = Linear(c.hidden, self.inner)
        self.in_proj_b = Linear(c.hidden, c.v_heads)
        self.in_proj_a = Linear(c.hidden, c.v_heads)
        self.conv1d = nn.Conv1d(self.channels, self.channels, c.taps, groups=self.channels, bias=False)
        nn.init.normal_(self.conv1d.weight, std=0.1)
        self.conv1d.weight.data[:, 0, -1] += 0.7
        self.A_log = nn.Parameter(torch.linspace(1, 16, c.v_heads).log())
        dt = torch.logspace(-3, -1, c.v_heads)
        self.dt_bias = nn.Parameter(dt + (-torch.expm1(-dt)).log())  # softplus⁻¹
        self.norm = Norm(c.state_dim, c.eps, centre=0.0)
        self.out_proj = Linear(self.inner, c.hidden)

    def heads(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels (..., channels) to q, k, v (..., v_heads, state_dim), q and k normalised."""
        c, size = self.c, self.c.k_heads * self.c.state_dim
        q, k, v = silu(u).split([size, size, self.inner], -1)
        q, k = (x.unflatten(-1, (c.k_heads, c.state_dim)).float() for x in (q, k))
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(c.v_heads // c.k_heads, -2).to(u.dtype) for x in (q * c.state_dim**-0.5, k))
        return q, k, v.unflatten(-1, (c.v_heads, c.state_dim))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and β, float32 (..., v_heads)."""
        g = -self.A_log.exp() * softplus(self.in_proj_a(x).float() + self.dt_bias)
        return g, self.in_proj_b(x).float().sigmoid()

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, (self.c.v_heads, -1))
        return self.out_proj((self.norm(o) * silu(z.float())).to(x.dtype).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        past = pad(self.in_proj_qkv(x), (0, 0, self.c.taps - 1, 0))
        taps = self.conv1d.weight[:, 0].to(x.dtype)
        u = sum(past[:, j : j + x.shape[1]] * taps[:, j] for j in range(self.c.taps))
        return self.finish(delta_rule(*self.heads(u), *self.gates(x)), x)

    def new_state(self, batch: int, length: int, like: Tensor) -> list[Tensor]:
        c = self.c
        state = torch.zeros(batch, c.v_heads, c.state_dim, c.state_dim, device=like.device)
        return [like.new_zeros(batch, c.taps - 1, self.channels), state]

    def step(self, x: Tensor, position: Tensor, past: Tensor, state: Tensor) -> Tensor:
        rows = torch.cat([past, self.in_proj_qkv(x)[:, None]], 1)
        past.copy_(rows[:, 1:])
        q, k, v = (y.float() for y in self.heads((rows * self.conv1d.weight[:, 0].mT.to(x.dtype)).sum(1)))
        g, beta = self.gates(x)
        decay = g.exp()[..., None]
        read = torch.stack([k, q], 2) @ state * decay[..., None]  # before the update
        delta = beta[..., None] * (v - read[:, :, 0])
        state.copy_(state * decay[..., None] + k[..., None] * delta[..., None, :])
        o = read[:, :, 1] + (k * q).sum(-1, keepdim=True) * delta
        return self.finish(o.to(x.dtype), x)


class MLP(nn.Module):
    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(hidden, ffn), Linear(hidden, ffn), Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config, index: int):
        super().__init__()
        self.input_layernorm = Norm(c.hidden, c.eps)
        if c.attends(index):
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)
        self.mlp = MLP(c.hidden, c.ffn)

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, position: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = x + self.mixer.step(self.input_layernorm(x), position, a, b)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.norm = Norm(c.hidden, c.eps)


class Target(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.c, self.model = c, Trunk(c)
        for layer in self.model.layers:  # residual branches start small, so depth does not blow up the stream
            out = layer.mixer.o_proj if isinstance(layer.mixer, Attention) else layer.mixer.out_proj
            for weight in (out.weight, layer.mlp.down_proj.weight):
                weight.data /= (2 * c.layers) ** 0.5

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return embedding(tokens, self.model.embed_tokens.weight).to(dtype)

    def head(self, x: Tensor) -> Tensor:
        return linear(x, self.model.embed_tokens.weight.to(x.dtype))

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32, taps: tuple[int, ...] = ()) -> list[Tensor]:
        """Residual streams after the layers `taps`, then the normed output; each (B, T, hidden)."""
        length = tokens.shape[1]  # padded to whole chunks; what follows a token does not change it
        x, found = self.embed(pad(tokens, (0, -length % 64)), dtype), []
        for i, layer in enumerate(self.model.layers):
            x = layer(x)
            if i in taps:
                found.append(x[:, :length])
        return [*found, self.model.norm(x)[:, :length]]

    def new_states(self, batch: int, length: int, dtype: torch.dtype) -> list[list[Tensor]]:
        like = self.model.norm.weight.new_zeros(0, dtype=dtype)
        return [layer.mixer.new_state(batch, length, like) for layer in self.model.layers]

    def step(self, tokens: Tensor, position: Tensor, states: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
        """Normed output (B, hidden) after one token (B,) at `position` (int64, (1,)); advances `states` in place."""
        x = self.embed(tokens, dtype)
        for layer, state in zip(self.model.layers, states, strict=True):
            x = layer.step(x, position, *state)
        return self.model.norm(x)

    def compile(self) -> None:
        """Compiles each layer by itself: one graph per layer kind and shape."""
        for layer in self.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
            layer.step = torch.compile(layer.step, dynamic=False)


def load(path: Path, device: str = "cpu") -> Target:
    """A checkpoint written by train_target.py, in float32."""
    saved = torch.load(path, map_location=device)
    model = Target(Config(**saved["config"])).to(device)
    model.load_state_dict({k: v.float() for k, v in saved["weights"].items()})
    return model.requires_grad_(False)
