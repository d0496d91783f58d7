"""Second, short stage of the target: unlikelihood on its own loops (Welleck et al. 2020, arXiv 1908.04319).

    python unloop.py build/

Every round writes greedy continuations of corpus text, marks the tokens that continue a loop and lowers their
probability, −log(1 − p), beside ordinary training on corpus windows. Reads train*.bin and base.pt, or the checkpoint
named by --start; writes target.pt.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from continuation import Generator, repeats
from optimiser import Optimiser
from target import Target, load
from torch import Tensor
from train_target import loss, save, stream, windows

LENGTH, BATCH = 384, 2048


def unlikelihood(model: Target, x: Tensor, tokens: Tensor, marked: Tensor) -> Tensor:
    """Mean of −log(1 − p(token)) over the marked tokens (B, T); x (B, T, hidden) has seen what precedes each."""
    logits = model.head(x).float()
    p = (logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)).exp()
    return (-torch.log1p(-p.clamp(max=1 - 1e-4)) * marked).sum() / marked.sum().clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--steps", type=int, default=16, help="per round")
    parser.add_argument("--until", type=float, default=0.33, help="share of texts that loop after 128 tokens")
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--start", default="base.pt", help="checkpoint in the folder")
    args = parser.parse_args()
    torch.manual_seed(3)
    torch.set_float32_matmul_precision("high")
    model = load(args.folder / args.start, "cuda").requires_grad_(True)
    model.compile()
    train = stream(sorted(args.folder.glob("train*.bin")), "cuda")
    corpus, prompts = windows(train, 1024, 48, seed=4), windows(train, LENGTH, BATCH, seed=5)
    optimiser = Optimiser(model.named_parameters(), lr=0.001, adam_lr=1e-4)
    compiled_loss = torch.compile(loss, dynamic=False)
    compiled_unlikelihood = torch.compile(unlikelihood, dynamic=False)
    generator = Generator(model, BATCH, LENGTH, torch.bfloat16)
    log, start = [], time.time()
    for round_ in range(args.rounds + 1):
        lengths = torch.randint(64, 192, (BATCH,), device="cuda")
        tokens = generator.run(next(prompts)[:, :LENGTH], lengths)
        marked = repeats(tokens) & (torch.arange(LENGTH, device="cuda") >= lengths[:, None])
        looping = marked.gather(1, lengths[:, None] + 127).float().mean().item()
        log.append({"round": round_, "looping": round(looping, 4)})
        print(json.dumps(log[-1]), flush=True)
        if looping <= args.until or round_ == args.rounds:
            break
        candidates = torch.where(marked.any(1))[0]
        for step in range(args.steps):
            rows = candidates[(torch.arange(128, device="cuda") + 128 * step) % len(candidates)]
            batch, own = next(corpus), tokens[rows]
            value = compiled_loss(model, model(batch[:, :-1], torch.bfloat16)[-1], batch[:, 1:])
            x = model(own[:, :-1], torch.bfloat16)[-1]
            penalty = compiled_unlikelihood(model, x, own[:, 1:], marked[rows, 1:].float())
            (value + args.weight * penalty).backward()
            optimiser.step(1 - step / args.steps)
        log[-1] |= {"loss": round(value.item(), 4), "penalty": round(penalty.item(), 4)}
    save(model, model.c.asdict(), args.folder / "target.pt")
    report = {"seconds": round(time.time() - start, 1), "log": log}
    (args.folder / "unloop.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
