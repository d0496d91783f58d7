"""Train the draft on the target's own greedy text.

    python train_draft.py build/ --steps 30000

Reads target.pt, train*.bin, unseen.bin and tokenizer.json; writes draft.pt (bfloat16 weights) and draft.json. The
target writes all the while: the newest POOL batches lie ready with the features of every position, and a text is
read about READS times. The acceptance length in the log is measured as in evaluate.py, on packages never trained on.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from continuation import Generator, repeats
from draft import Draft, DraftConfig, block_inputs
from draft import load as load_draft
from evaluate import NEW, documents, greedy, prompts_of, rows_at, walk
from optimiser import Optimiser, trapezoid
from target import Target, load
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_target import save, stream, windows

WRITTEN = 4096  # texts that the target writes at a time
LENGTH, PROMPT = 384, (96, 240)  # of a text, in tokens, and of the part of it that is corpus
POOL, READS = 8, 24
BATCH, ANCHORS = 64, 32
PLAIN = 0.25  # weight of a place where no block of the draft has ended yet, when anchors are drawn
LOOPING = 0.2  # and of a place inside a loop: once learned, they teach little
DEPTH, FLOOR = 6.0, 0.2


def own_text(model: Target, train: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Corpus prompts, continued greedily: tokens int64 (WRITTEN, LENGTH) and prompt lengths (WRITTEN,)."""
    generator = Generator(model, WRITTEN, LENGTH, torch.bfloat16)
    prompts = windows(train, LENGTH, WRITTEN, seed=6)
    while True:
        lengths = torch.randint(*PROMPT, (WRITTEN,), device=train.device)
        yield generator.run(next(prompts)[:, :LENGTH], lengths), lengths


class Pool:
    """The newest texts, with the target features that the draft reads and the places where its blocks ended."""

    def __init__(self, target: Target, train: Tensor, config: DraftConfig):
        size, device = POOL * WRITTEN, train.device
        self.target, self.config, self.source, self.batches = target, config, own_text(target, train), 0
        self.tokens = torch.zeros(size, LENGTH, dtype=torch.int16, device=device)
        self.weight = torch.zeros(size, LENGTH, device=device)  # of a place as an anchor
        self.landed = torch.zeros(size, LENGTH, dtype=torch.bool, device=device)
        width = len(config.taps) * config.hidden
        self.features = torch.zeros(size, LENGTH, width, dtype=torch.bfloat16, device=device)
        self.new_tokens = 0

    @torch.no_grad()
    def write(self) -> None:
        """Replace the oldest batch by a new one."""
        tokens, lengths = next(self.source)
        first = self.batches % POOL * WRITTEN
        place = torch.arange(LENGTH, device=tokens.device)
        allowed = (place >= lengths[:, None] - 1) & (place < LENGTH - self.config.block)
        self.tokens[first : first + WRITTEN] = tokens.to(torch.int16)
        self.weight[first : first + WRITTEN] = torch.where(repeats(tokens), LOOPING, 1.0) * allowed
        self.landed[first : first + WRITTEN] = False
        for row in range(0, WRITTEN, BATCH):
            taps = self.target(tokens[row : row + BATCH], torch.bfloat16, self.config.taps)[:-1]
            self.features[first + row : first + row + BATCH] = torch.cat(taps, -1)
        self.batches += 1
        self.new_tokens += tokens.numel() - int(lengths.sum())

    def draw(self) -> tuple[Tensor, Tensor]:
        """Sample texts (BATCH,) and anchors in them (BATCH, ANCHORS), mostly where decoding starts a block."""
        texts = min(self.batches, POOL) * WRITTEN
        rows = torch.randint(texts, (BATCH,), device=self.tokens.device)
        weight = self.weight[rows] * (PLAIN + self.landed[rows].float())
        return rows, torch.multinomial(weight, ANCHORS)


def block_loss(
    draft: Draft, target: Target, features: Tensor, tokens: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of rows 1… against the tokens at their positions, and the tokens that the draft proposes
    for these positions (B, n, block − 1).

    A row's weight is the probability, by the draft itself, that all rows before it are right: only then is it used. A
    small weight that falls with depth is added for the time when that probability is near 0.
    """
    block = draft.c.block
    x = draft(features, block_inputs(target, tokens, anchors, block, features.dtype), anchors)
    depth = torch.arange(1, block, device=tokens.device)
    following = tokens.gather(1, (anchors[..., None] + depth).flatten(1))
    logits = target.head(x[:, :, 1:].flatten(0, 2)).float()
    each = cross_entropy(logits, following.flatten(), reduction="none").view(-1, block - 1)
    reached = (each.detach() - each.detach().cumsum(1)).exp()
    weight = reached + FLOOR * torch.exp(-(depth - 1) / DEPTH)
    return (each * weight).sum() / weight.sum(), logits.argmax(-1).view(*anchors.shape, -1)


def gains(proposed: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Tokens that a step from each anchor (B, n) yields: those proposed (B, n, depth) that are right, and the bonus."""
    place = anchors[..., None] + torch.arange(1, proposed.shape[-1] + 1, device=tokens.device)
    truth = tokens.gather(1, place.flatten(1)).view_as(proposed)
    return 1 + (proposed == truth).cumprod(-1).sum(-1)


@torch.no_grad()
def acceptance_length(draft: Draft, target: Target, tokens: Tensor, lengths: Tensor) -> float:
    """Mean gain per step of the chain over NEW tokens of each stored greedy text."""
    steps: list[int] = []
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        anchors = torch.arange(length, length + NEW, device=row.device)[None]
        text = row[None, : length + NEW + draft.c.block]
        proposed = rows_at(draft, target, text, anchors, torch.bfloat16)[1][..., 0]
        steps += walk(gains(proposed[None], text, anchors)[0].tolist())
    return sum(steps) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--start", type=Path, help="a draft to continue from")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    target, plain = (load(args.folder / "target.pt", args.device) for _ in range(2))
    target.compile()  # for few shapes; `plain` takes the many of the held-out texts
    train = stream(sorted(args.folder.glob("train*.bin")), args.device)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    texts = [tokenizer.decode(d.tolist()) for d in documents(stream([args.folder / "unseen.bin"], "cpu"))]
    if args.start is not None:
        draft = load_draft(args.start, args.device).requires_grad_(True)
    else:
        draft = Draft(DraftConfig()).to(args.device)
        draft.norm.weight.data.copy_(1 + target.model.norm.weight)  # the head expects what the target feeds it
    config = draft.c
    held_out = greedy(plain, prompts_of(tokenizer, texts, 64, seed=12), NEW + config.block, torch.bfloat16)

    start, writing = time.time(), 0.0
    pool = Pool(target, train, config)
    optimiser = Optimiser(draft.named_parameters(), lr=args.lr, adam_lr=args.lr / 10)
    step_loss = torch.compile(block_loss, dynamic=False)
    log = []
    for step in range(args.steps):
        if step % (READS * WRITTEN // BATCH) == 0:
            started = time.time()
            for _ in range(POOL // 2 if step == 0 else 1):
                pool.write()
            writing += time.time() - started
        rows, anchors = pool.draw()
        tokens = pool.tokens[rows].long()
        value, proposed = step_loss(draft, target, pool.features[rows], tokens, anchors)
        value.backward()
        pool.landed[rows[:, None], anchors + gains(proposed, tokens, anchors)] = True
        optimiser.step(trapezoid((step + 1) / args.steps))
        if step % 200 == 199 or step == 9:
            log.append({"step": step + 1, "seconds": round(time.time() - start, 1), "loss": round(value.item(), 4)})
        if step % 2000 == 1999 or step == 9:
            log[-1]["length"] = round(acceptance_length(draft, plain, *held_out), 3)
            print(json.dumps(log[-1]), flush=True)
            save(draft, config.asdict(), args.folder / "draft.pt")
    save(draft, config.asdict(), args.folder / "draft.pt")
    report = {
        "parameters": sum(p.numel() for p in draft.parameters()),
        "texts": pool.batches * WRITTEN,
        "generated tokens": pool.new_tokens,
        "seconds of it writing": round(writing, 1),
        "steps": args.steps,
        "seconds": round(time.time() - start, 1),
        "log": log,
    }
    (args.folder / "draft.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
