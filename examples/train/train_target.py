"""Train the target on next-token prediction.

    python train_target.py build/ --steps 10000

Reads train*.bin, known.bin, unseen.bin and tokens.json; writes base.pt (bfloat16 weights) and target.json (log and
held-out bits per byte). The last steps use windows of the full context.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from optimiser import Optimiser, trapezoid
from target import Config, Target
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TOKENS_PER_STEP = 96 * 1024


def stream(paths: list[Path], device: str) -> Tensor:
    """Token files, one after another, as int16 (the vocabulary is below 32768)."""
    assert paths, "no token files"
    return torch.from_numpy(np.concatenate([np.fromfile(p, np.int16) for p in paths])).to(device)


def windows(tokens: Tensor, length: int, count: int, seed: int) -> Iterator[Tensor]:
    """Batches (count, length + 1), every token once per pass, cut at new places and shuffled for each."""
    random = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(length, (1,), generator=random))
        starts = torch.randperm((len(tokens) - offset - 1) // length, generator=random) * length + offset
        for some in starts[: len(starts) // count * count].to(tokens.device).split(count):
            yield tokens[some[:, None] + torch.arange(length + 1, device=tokens.device)].long()


def loss(model: Target, x: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model.head(x).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_byte(model: Target, tokens: Tensor, about: dict, dtype: torch.dtype, limit: int = 400_000) -> float:
    """Bits per byte of a held-out stream, in windows of 4096 tokens; bytes by the stream's mean per token."""
    length = model.c.context
    rows = min(len(tokens), limit) // length // 6 * 6
    batch = tokens[: rows * length].view(rows, length).long()
    nats, count = 0.0, 0
    for some in batch.split(6):
        logits = model.head(model(some, dtype)[-1][:, :-1]).float()
        nats += cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="sum").item()
        count += some[:, 1:].numel()
    return nats / count / math.log(2) * about["tokens"] / about["bytes"]


def save(model: nn.Module, config: dict, path: Path) -> None:
    weights = {k: v.bfloat16() for k, v in model.state_dict().items()}
    torch.save({"config": config, "weights": weights}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--long", type=float, default=0.15, help="share of the steps on windows of the full context")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16
    train = stream(sorted(args.folder.glob("train*.bin")), args.device)
    about = json.loads((args.folder / "tokens.json").read_text())
    held_out = {name: stream([args.folder / f"{name}.bin"], args.device) for name in ("known", "unseen")}

    model = Target(Config()).to(args.device)
    model.compile()
    compiled_loss = torch.compile(loss, dynamic=False)
    optimiser = Optimiser(model.named_parameters(), lr=0.02, adam_lr=3e-3)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(train):,} tokens", flush=True)

    log, start, switch = [], time.time(), round(args.steps * (1 - args.long))
    short = windows(train, 1024, TOKENS_PER_STEP // 1024, seed=1)
    full = windows(train, model.c.context, TOKENS_PER_STEP // model.c.context, seed=2)
    for step in range(args.steps):
        batch = next(short if step < switch else full)
        value = compiled_loss(model, model(batch[:, :-1], dtype)[-1], batch[:, 1:])
        value.backward()
        optimiser.step(trapezoid((step + 1) / args.steps))
        if step % 100 == 99 or step == 9:
            log.append({"step": step + 1, "seconds": round(time.time() - start, 1), "loss": round(value.item(), 4)})
        if step % 1000 == 999:
            bpb = bits_per_byte(model, held_out["known"], about["known"], dtype, limit=100_000)
            log[-1]["known bits/byte"] = round(bpb, 4)
            save(model, model.c.asdict(), args.folder / "base.pt")
        if step % 500 == 499 or step == 9:
            print(json.dumps(log[-1]), flush=True)
    save(model, model.c.asdict(), args.folder / "base.pt")
    report = {
        "parameters": size,
        "steps": args.steps,
        "tokens": args.steps * TOKENS_PER_STEP,
        "unique tokens": len(train),
        "seconds": round(time.time() - start, 1),
        "bits per byte": {n: round(bits_per_byte(model, t, about[n], dtype), 4) for n, t in held_out.items()},
        "log": log,
    }
    (args.folder / "target.json").write_text(json.dumps(report, indent=1) + "\n")
    print({k: v for k, v in report.items() if k != "log"}, flush=True)


if __name__ == "__main__":
    main()
