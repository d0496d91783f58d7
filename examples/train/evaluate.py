"""Measure the pair: bits per byte, completions that parse, loops, acceptance lengths.

    python evaluate.py build/

Reads target.pt, draft.pt, tokenizer.json and the held-out streams; writes report.json and report.md. Under greedy
decoding the accepted path is the plain continuation, so draft rows at every place of a stored continuation and a walk
over them give the lengths of chain and tree exactly.
"""

import argparse
import ast
import heapq
import json
import re
from pathlib import Path

import numpy as np
import torch
from continuation import Generator, loops
from draft import Draft, block_inputs
from draft import load as load_draft
from target import Target
from target import load as load_target
from tokenizers import Tokenizer
from torch import Tensor
from train_target import bits_per_byte, stream

NEW, PROMPTS, TREE = 128, 64, 32
INCOMPLETE = 0x4000 | ast.PyCF_ONLY_AST  # PyCF_ALLOW_INCOMPLETE_INPUT: an unfinished statement has an error of its own
SIGNATURE = re.compile(r"^( *)def \w+\([^\n]*\)( -> [^\n]+)?:\n", re.M)


def greedy(target: Target, prompts: list[list[int]], new: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Continue each prompt by `new` tokens: tokens (n, longest + new) and prompt lengths."""
    device = target.model.norm.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    return Generator(target, len(prompts), longest + new, dtype).run(padded, lengths), lengths


def tails(tokens: Tensor, lengths: Tensor, new: int) -> Tensor:
    """The first `new` tokens after each prompt, (n, new)."""
    return tokens.gather(1, lengths[:, None] + torch.arange(new, device=tokens.device))


def verdict(code: str, indent: int) -> str:
    """Judge a function whose text was cut off: "parses", "wrong", or "empty" if no statement is complete.

    The cut-off last statement is dropped; it must be unfinished, not wrong, in the text before its cut-off last line.
    """
    opening = "".join(" " * i + "if 1:\n" for i in range(0, indent, 4))
    lines = code.split("\n")[:-1]
    try:
        compile(opening + "\n".join(lines) + "\n", "", "exec", INCOMPLETE)
    except SyntaxError as error:
        if "incomplete input" not in str(error):
            return "wrong"
    for end in range(len(lines), 1, -1):
        try:
            ast.parse(opening + "\n".join(lines[:end]) + "\n")
            return "parses"
        except SyntaxError:
            continue
    return "empty"


def completions(target: Target, tokenizer: Tokenizer, texts: list[str], dtype: torch.dtype) -> dict:
    """Complete 100 held-out signatures by 64 tokens, each after up to 1500 characters of whole lines."""
    prompts: list[str] = []
    starts: list[re.Match[str]] = []
    for text in texts:
        found = [m for m in SIGNATURE.finditer(text) if len(m[1]) % 4 == 0]
        if found and len(prompts) < 100:
            match = found[len(found) // 2]
            first = text.find("\n", max(0, match.start() - 1500), match.start()) + 1
            prompts.append(text[first : match.end()])
            starts.append(match)
    ids = [tokenizer.encode(p).ids for p in prompts]
    tokens, lengths = greedy(target, ids, 64, dtype)
    written = [tokenizer.decode(row) for row in tails(tokens, lengths, 64).tolist()]
    results = [verdict(m[0] + w, len(m[1])) for m, w in zip(starts, written, strict=True)]
    counts = {name: results.count(name) for name in ("parses", "wrong", "empty")}
    samples = [prompts[i][-200:] + "⟦" + written[i] + "⟧ " + results[i] for i in range(0, len(prompts), 9)]
    return {"prompts": len(prompts), **counts, "samples": samples}


def chain_gain(proposed: list[int], truth: list[int]) -> int:
    """Accepted tokens and the bonus token."""
    gained = 0
    while gained < len(proposed) and proposed[gained] == truth[gained]:
        gained += 1
    return gained + 1


def tree_gain(logp: np.ndarray, ids: np.ndarray, truth: list[int], budget: int) -> int:
    """Gain of DDTree (arXiv 2604.12989): the `budget` likeliest prefixes under the draft's marginals.

    logp, ids (depth, ≥ budget): the likeliest tokens of each row, best first.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-logp[0, 0], (0,))]
    nodes: set[tuple[int, ...]] = set()
    while heap and len(nodes) < budget:
        score, ranks = heapq.heappop(heap)
        nodes.add(ranks)
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < logp.shape[1]:
            heapq.heappush(heap, (score + logp[depth, rank] - logp[depth, rank + 1], (*ranks[:-1], rank + 1)))
        if depth + 1 < len(logp):
            heapq.heappush(heap, (score - logp[depth + 1, 0], (*ranks, 0)))
    path: tuple[int, ...] = ()
    for depth in range(len(ids)):
        match = np.flatnonzero(ids[depth] == truth[depth])
        if len(match) == 0 or (*path, int(match[0])) not in nodes:
            break
        path = (*path, int(match[0]))
    return len(path) + 1


def lookup(history: list[int], count: int) -> list[int]:
    """Prompt lookup: what followed the newest earlier occurrence of the last 4-, 3-, 2- or 1-gram."""
    for n in (4, 3, 2, 1):
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == history[-n:]:
                return history[start + n : start + n + count]
    return []


def walk(gain_after: list[int]) -> list[int]:
    """Gains of successive steps up to NEW tokens; `gain_after[i - 1]` is the gain when i tokens are known."""
    done, gains = 1, []  # the first token comes from the prompt's own pass
    while done < NEW:
        gains.append(gain_after[done - 1])
        done += gains[-1]
    return gains


@torch.no_grad()
def rows_at(draft: Draft, target: Target, tokens: Tensor, anchors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The TREE likeliest tokens of every row 1… at every anchor (1, n): log-probabilities, ids (n, block − 1, TREE)."""
    features = torch.cat(target(tokens, dtype, draft.c.taps)[:-1], -1)
    x = draft(features, block_inputs(target, tokens, anchors, draft.c.block, dtype), anchors)
    best = target.head(x[0, :, 1:]).float().log_softmax(-1).topk(TREE)
    return best.values, best.indices


def acceptance(target: Target, draft: Draft, prompts: list[list[int]], dtype: torch.dtype) -> dict:
    """Gain per step by draft chain, draft tree and prompt lookup: over all texts and over those without a loop."""
    depth = draft.c.block - 1
    tokens, lengths = greedy(target, prompts, NEW + draft.c.block, dtype)
    looping = loops(tails(tokens, lengths, NEW)).tolist()
    gains: dict[str, list[list[int]]] = {"chain": [], "tree": [], "lookup": []}
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        text = row[: length + NEW + draft.c.block].tolist()
        anchors = torch.arange(length, length + NEW, device=row.device)[None]
        logp, ids = (y.cpu().numpy() for y in rows_at(draft, target, row[None, : len(text)], anchors, dtype))

        truth = [text[length + i : length + i + depth] for i in range(NEW)]
        found = [lookup(text[: length + i], depth) for i in range(NEW)]
        gains["chain"].append(walk([chain_gain(ids[i - 1, :, 0].tolist(), truth[i]) for i in range(1, NEW)]))
        gains["tree"].append(walk([tree_gain(logp[i - 1], ids[i - 1], truth[i], TREE) for i in range(1, NEW)]))
        gains["lookup"].append(walk([chain_gain(found[i], truth[i]) for i in range(1, NEW)]))

    def mean(name: str, chosen: list[int]) -> float:
        return round(sum(sum(gains[name][i]) for i in chosen) / sum(len(gains[name][i]) for i in chosen), 3)

    groups = {"all": list(range(len(prompts))), "no loop": [i for i, is_loop in enumerate(looping) if not is_loop]}
    return {
        "prompts": len(prompts),
        "looping": round(sum(looping) / len(looping), 4),
        **{group: {name: mean(name, chosen) for name in gains} for group, chosen in groups.items()},
    }


def prompts_of(tokenizer: Tokenizer, texts: list[str], count: int, seed: int) -> list[list[int]]:
    """Whole lines from random places of random documents, about 128 to 256 tokens."""
    random, found = np.random.default_rng(seed), list[list[int]]()
    while len(found) < count:
        text = texts[random.integers(len(texts))]
        start = text.find("\n", random.integers(len(text))) + 1
        end = text.rfind("\n", start, start + int(random.integers(500, 1000))) + 1
        ids = tokenizer.encode(text[start:end]).ids
        if 128 <= len(ids) <= 256:
            found.append(ids)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loop-prompts", type=int, default=512)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    target = load_target(args.folder / "target.pt", args.device)
    draft = load_draft(args.folder / "draft.pt", args.device)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    about = json.loads((args.folder / "tokens.json").read_text())
    report: dict = {"parameters": {"target": sum(p.numel() for p in target.parameters())}}
    report["parameters"]["draft"] = sum(p.numel() for p in draft.parameters())
    for split in ("known", "unseen"):
        tokens = stream([args.folder / f"{split}.bin"], args.device)
        texts = [tokenizer.decode(d.tolist()) for d in documents(tokens)]
        many = prompts_of(tokenizer, texts, args.loop_prompts, seed=11)
        report[split] = {
            "bits per byte": round(bits_per_byte(target, tokens, about[split], dtype), 4),
            "completions": completions(target, tokenizer, texts, dtype),
            "looping": round(loops(tails(*greedy(target, many, NEW, dtype), NEW)).float().mean().item(), 4),
            "acceptance": acceptance(target, draft, many[:PROMPTS], dtype),
        }
        print(split, {k: v for k, v in report[split].items() if k != "completions"}, flush=True)
        print({k: v for k, v in report[split]["completions"].items() if k != "samples"}, flush=True)
    (args.folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    (args.folder / "report.md").write_text(table(report))


def documents(tokens: Tensor) -> list[np.ndarray]:
    rows = tokens.cpu().numpy()
    return [d for d in np.split(rows, np.flatnonzero(rows == 0)) if len(d) > 200]


def table(report: dict) -> str:
    """The report as Markdown."""
    known, unseen = report["known"], report["unseen"]
    lines = ["| | held-out files | unseen packages |", "|---|---|---|"]
    lines.append(f"| bits per byte | {known['bits per byte']} | {unseen['bits per byte']} |")
    for name in ("parses", "wrong", "empty"):
        lines.append(f"| completions of 100: {name} | {known['completions'][name]} | {unseen['completions'][name]} |")
    lines.append(f"| greedy texts that loop | {known['looping']:.1%} | {unseen['looping']:.1%} |")
    for group in ("all", "no loop"):
        for name in ("chain", "tree", "lookup"):
            row = [str(part["acceptance"][group][name]) for part in (known, unseen)]
            lines.append(f"| acceptance length, {name}, {group} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
