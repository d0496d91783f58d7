"""Train a multi-token-prediction block for the demo model that comes with the package.

    python train_mtp.py out/demo-qwen35-mtp --minutes 5    # a GPU
    python export_mtp.py out/demo-qwen35-mtp out/demo-qwen35-mtp-Q8_0.gguf
    python -m generate bench --spec-prompts PROMPTS.jsonl --draft out/demo-qwen35-mtp-Q8_0.gguf

Reads the model from the package and Python files as prompts (--text, by default the standard library of the Python that
runs this); needs torch beside the package, and no network. Writes config.json and model.safetensors, bfloat16, named as
in Qwen3.5, loads them with the package's NumPy backend, and prints the acceptance on prompts of files not trained on.

On one thread of a CPU: --device cpu --batch 8 --written 128 --others 1500 --minutes 90.

The block learns the target's own greedy text. It reads the target's hidden states first, then its own outputs in their
place, as it does when it drafts further than one token.
"""

import argparse
import json
import random
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from continuation import Generator
from export_mtp import NAMES
from optimiser import Optimiser, trapezoid
from safetensors.torch import save_file
from target import Attention, Config, Layer, Linear, Norm, Target
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.checkpoint import Checkpoint, open_checkpoint
from common.decoders import Speculation
from common.demo import demo_path
from common.engine import Engine
from common.models import load_model
from common.models.drafts import load_pair
from common.quants import dequantize
from common.reference import NumpyOps
from common.tokenizer import Tokenizer, load_tokenizer
from generate.bench_spec import measure, table

LENGTH, PROMPT, CORPUS = 256, 96, 4_000_000  # tokens of a text; of its prompt, at most; of the files, at most
READS = 2  # how often each text is trained on
DEPTH = 4  # draft tokens that the loss covers
WEIGHTS = (1.0, 0.7, 0.5, 0.4)  # of their parts of the loss
ROWS = 3  # one row in ROWS counts in the loss
HELD_OUT, NEW = 12, 64  # files that are not trained on; tokens after a prompt of each
DELTA = {  # names of a Gated DeltaNet layer, of GGUF and of Hugging Face
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
            self.fc.weight[:, target.c.hidden :] += torch.eye(target.c.hidden)

    def forward(self, embedded: Tensor, before: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Normed outputs (B, T, hidden): each row's token, embedded, and the hidden state of the row before it.

        passes  keys and values of the passes before this one, to which its own are added
        """
        layer = self.layers[0]
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1))
        x = x + attend(layer.self_attn, layer.input_layernorm(x), passes)
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


def attend(attention: Attention, x: Tensor, passes: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of pass d: of the last d rows before it a row sees what passes 1 to d made, of earlier ones the first.

    So it is when the block drafts: the target's hidden states end where the draft begins.
    """
    c, length = attention.c, x.shape[1]
    place = torch.arange(length, device=x.device)
    q, k, v, gate = attention.project(x, place)
    passes.append((k, v))
    q, depth = q.unflatten(2, (c.kv_heads, -1)), len(passes) - 1
    keys, values = passes[0]
    seen = place[None] <= place[:, None] - depth
    scores = torch.einsum("btkgd,bskd->bktgs", q, keys).masked_fill(~seen[:, None], float("-inf"))
    later = [tuple(shifted(y, depth - i) for y in passes[i]) for i in range(1, depth + 1)]
    own = [torch.einsum("btkgd,btkd->bktg", q, key)[..., None] for key, _ in later]
    share = (torch.cat([scores, *own], -1).float() * c.head_dim**-0.5).softmax(-1).to(x.dtype)
    o = torch.einsum("bktgs,bskd->btkgd", share[..., :length], values)
    for i, (_, value) in enumerate(later):
        o = o + share[..., length + i].transpose(1, 2)[..., None] * value[:, :, :, None]
    return attention.o_proj((o.flatten(2, 3) * gate.sigmoid()).flatten(2))


def shifted(x: Tensor, rows: int) -> Tensor:
    """x (B, T, ...), of which row t is now at t + rows; zeros come before."""
    return torch.cat([x.new_zeros(x[:, :rows].shape), x[:, : x.shape[1] - rows]], 1)


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
        weights[f"model.layers.{parts[1]}.{own or (NAMES | DELTA)[short] + '.weight'}"] = values
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in weights.items()})
    return model.requires_grad_(False)


def python_files(folder: Path) -> list[Path]:
    """The folder's Python files in an order that is the same each time; those of installed packages are left out."""
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    if len(files) <= HELD_OUT:
        sys.exit(f"{folder} has {len(files)} Python files; more than {HELD_OUT} are needed")
    random.Random(0).shuffle(files)
    return files


def encoded(tokenizer: Tokenizer, files: list[Path]) -> Tensor:
    """The tokens of the files, one after another, CORPUS at most."""
    ids: list[int] = []
    for path in files:
        ids += tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore"))
        if len(ids) > CORPUS:
            break
    return torch.tensor(ids[:CORPUS])


def written(generator: Generator, corpus: Tensor) -> tuple[Tensor, Tensor]:
    """Texts (B, LENGTH) of the target: 8 to PROMPT tokens of the corpus and greedy text; its normed outputs beside."""
    count, device = len(generator.lengths), generator.tokens.device
    first = torch.randint(len(corpus) - PROMPT, (count, 1))
    lengths = torch.randint(8, PROMPT + 1, (count,))
    tokens = generator.run(corpus[first + torch.arange(PROMPT)].to(device), lengths.to(device))
    return tokens, generator.hidden.clone()


def loss(
    block: Block, target: Target, tokens: Tensor, hidden: Tensor, depth: int, others: int
) -> tuple[Tensor, list[Tensor]]:
    """Weighted cross-entropy of the target's greedy choices, and the share of each draft token that is right.

    tokens (B, T), the target's outputs hidden (B, T, hidden). At depth d a row reads what depth d - 1 gave for the row
    before it; at the first, the target's hidden state. One row in ROWS counts. A choice competes with the other rows'
    and with `others` tokens drawn at random.
    """
    embedded, total, right = target.embed(tokens, hidden.dtype), 0.0, []
    with torch.no_grad():
        drawn = torch.randperm(tokens.numel(), device=tokens.device)[: tokens.numel() // ROWS]
        drawn = drawn[drawn % tokens.shape[1] < tokens.shape[1] - 1]  # the last token has no choice of the target
        drawn = drawn[drawn % tokens.shape[1] >= DEPTH]  # before, a hidden state is made of zeros
        chosen = target.head(hidden.flatten(0, 1)[drawn]).argmax(-1)
        random_ids = torch.randperm(target.c.vocab, device=tokens.device)[:others]
        kept, place = torch.cat([chosen, random_ids]).unique(return_inverse=True)
        head, chosen = target.model.embed_tokens.weight[kept].to(hidden.dtype), place[: len(chosen)]
    passes: list[tuple[Tensor, Tensor]] = []
    for weight in WEIGHTS[:depth]:
        hidden = block(embedded, shifted(hidden, 1), passes)
        logits = nn.functional.linear(hidden.flatten(0, 1)[drawn], head).float()
        total = total + weight * cross_entropy(logits, chosen)
        right.append((logits.detach().argmax(-1) == chosen).float().mean())
    return total, right


def depth_at(done: float) -> int:
    """Draft tokens that the loss covers at the fraction `done`: the first alone at the beginning."""
    return 1 if done < 0.4 else 2 if done < 0.6 else DEPTH


def train(block: Block, target: Target, corpus: Tensor, args: argparse.Namespace) -> None:
    """Train until the steps are done or the time is over; the learning rate falls to zero by then."""
    dtype, start, step, done = torch.bfloat16, time.time(), 0, 0.0
    generator = Generator(target, args.written, LENGTH, dtype, keeps_hidden=True)
    optimiser = Optimiser(block.named_parameters(), lr=args.lr, adam_lr=args.lr / 10)
    while done < 1:
        tokens, hidden = written(generator, corpus)
        rows = torch.cat([torch.randperm(len(tokens), device=tokens.device) for _ in range(READS)])
        for batch in rows[: len(rows) // args.batch * args.batch].view(-1, args.batch):
            done = max((step + 1) / args.steps, (time.time() - start) / (60 * args.minutes))
            if done >= 1:
                break
            value, right = loss(block, target, tokens[batch], hidden[batch], depth_at(done), args.others)
            value.backward()
            optimiser.step(trapezoid(done))
            step += 1
            if step % args.every == 0:
                report = {"step": step, "seconds": round(time.time() - start), "loss": round(value.item(), 3)}
                print(json.dumps(report | {"right": [round(share.item(), 3) for share in right]}), flush=True)


def save(block: Block, target: Target, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(target.c.hugging_face() | {"mtp_num_hidden_layers": 1}, indent=1))
    weights = {f"mtp.{name}": p.detach().to(torch.bfloat16).cpu() for name, p in block.named_parameters()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def report(out: Path, checkpoint: Checkpoint, tokenizer: Tokenizer, files: list[Path]) -> int:
    """Print the acceptance of block, lookup and DFlash draft on prompts of `files`; 1 where a text differs."""
    plain = load_model(checkpoint, NumpyOps())
    given = [tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore"))[:PROMPT] for path in files]
    different = 0
    for name, path, budget in (("this block", out, 5), ("the demo's DFlash draft", demo_path("draft"), 15)):
        print(f"\n{name}, {len(given)} held-out prompts, {NEW} new tokens each, NumPy")
        engines = {"off": Engine(plain, tokenizer, 512), "chain": Engine(load_pair(path, plain), tokenizer, 512)}
        ways = {"plain": Speculation(), "lookup": Speculation("lookup", budget), "chain": Speculation("chain", budget)}
        results = measure(engines, ways, given, NEW)
        table(results)
        different += sum(result.different for result in results.values())
    return int(different > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0, help="the most that training takes")
    parser.add_argument("--steps", type=int, default=20_000, help="the most that are trained")
    parser.add_argument("--batch", type=int, default=64, help="texts of a step")
    parser.add_argument("--written", type=int, default=2048, help="texts that the target writes at once")
    parser.add_argument("--others", type=int, default=11008, help="tokens drawn to compete with the right ones: all")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--every", type=int, default=100, help="steps from one line of the log to the next")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(3)
    torch.set_float32_matmul_precision("high")
    checkpoint = open_checkpoint(demo_path())
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    files = python_files(args.text)
    target = target_of(checkpoint).to(args.device)
    block = Block(target.c)
    block.begin_as(target)
    block.to(args.device)
    train(block, target, encoded(tokenizer, files[HELD_OUT:]), args)
    save(block, target, args.out)
    return report(args.out, checkpoint, tokenizer, files[:HELD_OUT])


if __name__ == "__main__":
    sys.exit(main())
