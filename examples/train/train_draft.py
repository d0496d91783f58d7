"""Train the draft on the target's own greedy text.

    python train_draft.py build/ --steps 12000

Reads target.pt and train*.bin; writes draft.pt (bfloat16 weights) and draft.json.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from continuation import Generator
from draft import Draft, DraftConfig, block_inputs
from draft import load as load_draft
from optimiser import Optimiser, trapezoid
from target import Target, load
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_target import save, stream, windows

GENERATED_BATCH = 4096
BATCH, ANCHORS = 64, 32
DECAY = 6.0  # a row counts less the deeper it lies, as it is used only when all before it were right


def own_text(model: Target, train: Tensor, batches: int, length: int, prompt: int) -> tuple[Tensor, Tensor]:
    """Corpus prompts of 16 to `prompt` tokens, continued greedily: tokens int16 (n, length), prompt lengths (n,)."""
    generator = Generator(model, GENERATED_BATCH, length, torch.bfloat16)
    prompts, rows, lengths = windows(train, length, GENERATED_BATCH, seed=6), [], []
    for _ in range(batches):
        lengths.append(torch.randint(16, prompt, (GENERATED_BATCH,), device=train.device))
        rows.append(generator.run(next(prompts)[:, :length], lengths[-1]).to(torch.int16))
    return torch.cat(rows), torch.cat(lengths)


def block_loss(
    draft: Draft, target: Target, features: Tensor, tokens: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of rows 1… against the tokens at their positions, and the share right at each depth."""
    block = draft.c.block
    x = draft(features, block_inputs(target, tokens, anchors, block, features.dtype), anchors)
    depth = torch.arange(1, block, device=tokens.device)
    wanted = tokens.gather(1, (anchors[..., None] + depth).flatten(1))
    logits = target.head(x[:, :, 1:]).float().flatten(0, 2)
    each = cross_entropy(logits, wanted.flatten(), reduction="none").view(-1, block - 1)
    weight = torch.exp(-(depth - 1) / DECAY)
    right = (logits.argmax(-1) == wanted.flatten()).view(-1, block - 1)
    return (each * weight).mean(0).sum() / weight.sum(), right.cumprod(1).float().mean(0)


def grown(start: Path, config: DraftConfig) -> Draft:
    """A draft that begins as the stored one; layers it lacks come before its last and begin as the identity."""
    old, draft = load_draft(start), Draft(config)
    added = len(draft.layers) - len(old.layers)
    for layer in draft.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    last, weights = len(old.layers) - 1, {}
    for name, weight in old.state_dict().items():
        weights[name.replace(f"layers.{last}.", f"layers.{last + added}.")] = weight
    draft.load_state_dict(weights, strict=False)
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--layers", type=int, default=4, help="all sliding but the last")
    parser.add_argument("--start", type=Path, help="a draft to continue from; it may have fewer layers")
    parser.add_argument("--length", type=int, default=384, help="of a training text, in tokens")
    parser.add_argument("--prompt", type=int, default=176, help="longest part of it that is corpus")
    parser.add_argument(
        "--corpus-share", type=float, default=0.0, help="of the steps, first: anchors in the corpus too"
    )
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--generate", type=int, default=12, help=f"batches of {GENERATED_BATCH} sequences of own text")
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.set_float32_matmul_precision("high")
    target = load(args.folder / "target.pt", "cuda")
    target.compile()
    train = stream(sorted(args.folder.glob("train*.bin")), "cuda")
    start = time.time()
    text, lengths = own_text(target, train, args.generate, args.length, args.prompt)
    generated = time.time() - start
    print(f"{text.numel() - lengths.sum().item():,} tokens generated in {generated:.0f} s", flush=True)

    config = DraftConfig(sliding=(True,) * (args.layers - 1) + (False,))
    if args.start is not None:
        draft = grown(args.start, config).to("cuda")
    else:
        draft = Draft(config).to("cuda")
        draft.norm.weight.data.copy_(1 + target.model.norm.weight)  # the head expects what the target feeds it
    optimiser = Optimiser(draft.named_parameters(), lr=args.lr, adam_lr=args.lr / 10)
    step_loss = torch.compile(block_loss, dynamic=False)
    log, start, order = [], time.time(), torch.empty(0, dtype=torch.int64, device="cuda")
    for step in range(args.steps):
        if len(order) < BATCH:
            order = torch.randperm(len(text), device="cuda")
        rows, order = order[:BATCH], order[BATCH:]
        tokens = text[rows].long()
        with torch.no_grad():
            features = torch.cat(target(tokens, torch.bfloat16, config.taps)[:-1], -1)
        first = 1 if step < args.corpus_share * args.steps else lengths[rows, None] - 1
        span = args.length - config.block - first
        anchors = (first + torch.rand(BATCH, ANCHORS, device="cuda") * span).long()
        value, right = step_loss(draft, target, features, tokens, anchors)
        value.backward()
        optimiser.step(trapezoid((step + 1) / args.steps))
        if step % 200 == 199 or step == 9:
            length = 1 + right.sum().item()  # mean over the batch's blocks, bonus counted
            seconds = round(time.time() - start, 1)
            log.append({"step": step + 1, "seconds": seconds, "loss": round(value.item(), 4)})
            log[-1]["length"] = round(length, 3)
        if step % 1000 == 999 or step == 9:
            print(json.dumps(log[-1]), flush=True)
            save(draft, config.asdict(), args.folder / "draft.pt")
    save(draft, config.asdict(), args.folder / "draft.pt")
    report = {
        "parameters": sum(p.numel() for p in draft.parameters()),
        "sequences": len(text),
        "generated tokens": text.numel() - lengths.sum().item(),
        "generation seconds": round(generated, 1),
        "steps": args.steps,
        "seconds": round(time.time() - start, 1),
        "log": log,
    }
    (args.folder / "draft.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
