"""Train target and draft together, on the target's own greedy text.

    python train_pair.py build/

Four losses: next tokens of the corpus; unlikelihood of loops, as in unloop.py, while there are too many; the draft's
own loss, whose gradient reaches the target through the features, so that these predict more of the following tokens;
and, where the draft was first wrong with a token that the target found nearly as likely as its own, that token. Reads
and writes target.pt and draft.pt.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from continuation import Generator, repeats
from draft import load as load_draft
from optimiser import Optimiser, trapezoid
from target import Target, load
from torch import Tensor
from train_draft import LENGTH, LOOPING, PROMPT, block_loss, gains
from train_target import loss, save, stream, windows
from unloop import unlikelihood

WRITTEN, READS = 2048, 2
BATCH, ANCHORS = 128, 16
UNLIKELY, FEATURES, AGREE = 0.5, 0.3, 0.5  # weights of losses
NEAR = math.log(0.2)  # how likely the draft's token must be, beside the target's


def agreement(target: Target, x: Tensor, tokens: Tensor, anchors: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the target against those first wrong tokens of the draft that it nearly chose, and their share.

    x (B, T, hidden) the target's output for tokens (B, T); proposed (B, n, depth) after anchors (B, n).
    """
    gained = gains(proposed, tokens, anchors)
    wrong = gained <= proposed.shape[-1]
    token = proposed.gather(-1, gained.clamp(max=proposed.shape[-1])[..., None] - 1)
    before = (anchors + gained - 1)[..., None].expand(-1, -1, x.shape[-1])
    logp = target.head(x.gather(1, before)).float().log_softmax(-1)
    nearly = wrong & (logp.gather(-1, token)[..., 0] > logp.amax(-1) + NEAR)
    value = -(logp.gather(-1, token)[..., 0] * nearly).sum() / nearly.sum().clamp(min=1)
    return value, nearly.sum() / wrong.sum().clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--loops", type=float, default=0.265, help="unlikelihood above this share of looping texts")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(8)
    torch.set_float32_matmul_precision("high")
    target = load(args.folder / "target.pt", args.device).requires_grad_(True)
    draft = load_draft(args.folder / "draft.pt", args.device).requires_grad_(True)
    target.compile()
    train = stream(sorted(args.folder.glob("train*.bin")), args.device)
    corpus, prompts = windows(train, 1024, 48, seed=8), windows(train, LENGTH, WRITTEN, seed=9)
    learns = Optimiser(target.named_parameters(), lr=0.001, adam_lr=1e-4)
    draft_learns = Optimiser(draft.named_parameters(), lr=0.005, adam_lr=5e-4)
    compiled_loss, compiled_unlikelihood, compiled_block_loss, compiled_agreement = (
        torch.compile(f, dynamic=False) for f in (loss, unlikelihood, block_loss, agreement)
    )
    generator = Generator(target, WRITTEN, LENGTH, torch.bfloat16)
    place = torch.arange(LENGTH, device=args.device)
    log, start, looping = [], time.time(), 0.0
    for step in range(args.steps):
        if step % (READS * WRITTEN // BATCH) == 0:
            lengths = torch.randint(*PROMPT, (WRITTEN,), device=args.device)
            tokens = generator.run(next(prompts)[:, :LENGTH], lengths)
            repeated = repeats(tokens)
            marked = (repeated & (place >= lengths[:, None])).float()
            looping = repeated.gather(1, lengths[:, None] + 127).float().mean().item()
            places = torch.where(repeated, LOOPING, 1.0)
            places *= (place >= lengths[:, None] - 1) & (place < LENGTH - draft.c.block)
            log.append({"step": step, "seconds": round(time.time() - start, 1), "looping": round(looping, 4)})
        rows = (torch.arange(BATCH, device=args.device) + BATCH * step) % WRITTEN
        own, anchors, batch = tokens[rows], torch.multinomial(places[rows], ANCHORS), next(corpus)
        value = compiled_loss(target, target(batch[:, :-1], torch.bfloat16)[-1], batch[:, 1:])
        *taps, x = target(own, torch.bfloat16, draft.c.taps)
        drafted, proposed = compiled_block_loss(draft, target, torch.cat(taps, -1), own, anchors)
        agreed, nearly = compiled_agreement(target, x, own, anchors, proposed)
        total = value + FEATURES * drafted + AGREE * agreed
        if looping > args.loops:
            total = total + UNLIKELY * compiled_unlikelihood(target, x[:, :-1], own[:, 1:], marked[rows, 1:])
        total.backward()
        scale = trapezoid((step + 1) / args.steps)
        learns.step(scale)
        draft_learns.step(scale)
        if step % (READS * WRITTEN // BATCH) == 0:
            figures = {"loss": value, "draft": drafted, "agree": agreed, "nearly": nearly}
            log[-1] |= {name: round(figure.item(), 4) for name, figure in figures.items()}
            log[-1]["gain"] = round(gains(proposed, own, anchors).float().mean().item(), 3)
            print(json.dumps(log[-1]), flush=True)
    save(target, target.c.asdict(), args.folder / "target.pt")
    save(draft, draft.c.asdict(), args.folder / "draft.pt")
    report = {"seconds": round(time.time() - start, 1), "log": log}
    (args.folder / "pair.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
