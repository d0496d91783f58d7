"""Train a multi-token-prediction block for the demo model that comes with the package.

    python train_mtp.py out/demo-qwen35-mtp --steps 6000          # a GPU; --device cpu for a trial of a few steps
    python -m generate bench --spec PROMPTS.jsonl --draft out/demo-qwen35-mtp

Reads the model from the package and Python files as text (--text, by default the standard library of the Python that
runs this); needs torch beside the package. Writes config.json and model.safetensors, bfloat16, named as in Qwen3.5.

The block learns the target's own greedy choice at every position. It reads the target's hidden states first, then its
own outputs in their place, as it does when it drafts further than one token.
"""

import argparse
import json
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from optimiser import trapezoid
from safetensors.torch import save_file
from target import Config, Layer, Linear, Norm, Target
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.checkpoint import Checkpoint, open_checkpoint
from common.demo import demo_path
from common.quants import dequantize
from common.tokenizer import load_tokenizer

LENGTH, DEPTH = 512, 3  # tokens of a text; draft tokens that the loss covers
WEIGHTS = (1.0, 0.6, 0.4)  # of their parts of the loss
HELD_OUT = 16  # files that are not trained on, and texts of them that the report is measured on
NAMES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


class Block(nn.Module):
    """The block: one layer of the target that attends, between fc and a norm."""

    def __init__(self, c: Config):
        super().__init__()
        self.fc = Linear(2 * c.hidden, c.hidden)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(c.hidden, c.eps), Norm(c.hidden, c.eps)
        self.layers = nn.ModuleList([Layer(c, c.layers - 1)])
        self.norm = Norm(c.hidden, c.eps)

    def begin_as(self, target: Target) -> None:
        """Take the target's last layer and norm, and let the hidden state through."""
        self.layers[0].load_state_dict(target.model.layers[-1].state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        with torch.no_grad():
            self.fc.weight[:, target.c.hidden :] += torch.eye(target.c.hidden, device=self.fc.weight.device)

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Normed outputs (B, T, hidden): each row's token, embedded, and the hidden state of the row before it."""
        x = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1)
        return self.norm(self.layers[0](self.fc(x)))


def target_of(checkpoint: Checkpoint) -> Target:
    """The model of a GGUF file in float32: norms less 1, A_log of -exp(A_log), value heads grouped by key head."""
    model = Target(Config())
    c = model.c
    order = np.arange(c.v_heads).reshape(c.k_heads, -1).T.ravel()  # of the file: head r * Hk + g is g * R + r
    rows, keys = (order[:, None] * c.state_dim + np.arange(c.state_dim)).ravel(), 2 * c.k_heads * c.state_dim
    of_heads, of_rows = np.argsort(order), np.argsort(rows)
    weights = {}
    for name, tensor in checkpoint.tensors.items():
        values, parts = dequantize(tensor).reshape(tensor.shape), name.split(".")
        if parts[0] != "blk":
            outer = {"token_embd": "embed_tokens", "output_norm": "norm"}[parts[0]]
            weights[f"model.{outer}.weight"] = values - (outer == "norm")
            continue
        short = parts[2]
        if short.endswith("_norm") and short != "ssm_norm":
            values = values - 1
        if short in ("ssm_a", "ssm_dt", "ssm_beta", "ssm_alpha"):
            values = values[of_heads]
        if short in ("attn_qkv", "ssm_conv1d"):
            values = np.concatenate([values[:keys], values[keys:][of_rows]])
        values = values[of_rows] if short == "attn_gate" else values[:, of_rows] if short == "ssm_out" else values
        values = values[:, None] if short == "ssm_conv1d" else np.log(-values) if short == "ssm_a" else values
        own = {"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}.get(short)
        weights[f"model.layers.{parts[1]}.{own or NAMES[short] + '.weight'}"] = values
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in weights.items()})
    return model.requires_grad_(False)


def python_files(folder: Path) -> list[Path]:
    """The folder's Python files in an order that is the same each time; those of installed packages are left out."""
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    assert len(files) > HELD_OUT, f"{folder} has {len(files)} Python files; more than {HELD_OUT} are needed"
    random.Random(0).shuffle(files)
    return files


def texts(checkpoint: Checkpoint, files: list[Path]) -> Iterator[Tensor]:
    """Windows (LENGTH,) of the files' tokens; the files are read over and over."""
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    while True:
        for path in files:
            ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore"))
            for at in range(0, len(ids) - LENGTH, LENGTH):
                yield torch.tensor(ids[at : at + LENGTH])


def batches(source: Iterator[Tensor], size: int, device: str) -> Iterator[Tensor]:
    while True:
        yield torch.stack([next(source) for _ in range(size)]).to(device)


def passes(block: Block, target: Target, tokens: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """The block's logits of each depth (B, T, vocab), of the row's next token, and the target's greedy choice (B, T).

    At depth d a row reads what depth d - 1 gave for the row before it; at the first, the target's hidden state.
    """
    with torch.no_grad():
        hidden = target(tokens, dtype)[-1]
        chosen, embedded = target.head(hidden).argmax(-1), target.embed(tokens, dtype)
    logits = []
    for _ in range(DEPTH):
        hidden = block(embedded, nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])
        logits.append(target.head(hidden))
    return logits, chosen


def loss(logits: list[Tensor], chosen: Tensor) -> Tensor:
    """Of rows whose hidden state at this depth is not made of the zeros before the first token."""
    parts = [
        weight * cross_entropy(each[:, d + 1 :].float().flatten(0, 1), chosen[:, d + 1 :].flatten())
        for d, (weight, each) in enumerate(zip(WEIGHTS, logits, strict=True))
    ]
    return torch.stack(parts).sum()


@torch.no_grad()
def agreement(block: Block, target: Target, held_out: Tensor, dtype: torch.dtype) -> list[float]:
    """Share of the positions of held-out texts at which each depth drafts the target's choice."""
    logits, chosen = passes(block, target, held_out, dtype)
    right = [(each.argmax(-1) == chosen)[:, DEPTH:].float().mean().item() for each in logits]
    return [round(share, 3) for share in right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(3)
    torch.set_float32_matmul_precision("high")
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    checkpoint = open_checkpoint(demo_path())
    target = target_of(checkpoint).to(args.device)
    block = Block(target.c).to(args.device)
    block.begin_as(target)
    files = python_files(args.text)
    held_out = next(batches(texts(checkpoint, files[:HELD_OUT]), HELD_OUT, args.device))
    source = texts(checkpoint, files[HELD_OUT:])
    optimiser = torch.optim.AdamW(block.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    start = time.time()
    for step, tokens in zip(range(args.steps), batches(source, args.batch, args.device), strict=False):
        value = loss(*passes(block, target, tokens, dtype))
        optimiser.zero_grad()
        value.backward()
        optimiser.param_groups[0]["lr"] = args.lr * trapezoid((step + 1) / args.steps)
        optimiser.step()
        if step % 200 == 0 or step + 1 == args.steps:
            shares = agreement(block, target, held_out, dtype)
            report = {"step": step + 1, "seconds": round(time.time() - start), "loss": round(value.item(), 3)}
            print(json.dumps(report | {"agreement": shares}), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(target.c.hugging_face() | {"mtp_num_hidden_layers": 1}, indent=1))
    weights = {f"mtp.{name}": p.detach().to(torch.bfloat16).cpu() for name, p in block.named_parameters()}
    save_file(weights, args.out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
