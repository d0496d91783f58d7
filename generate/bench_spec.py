"""`python -m generate bench --spec PROMPTS`: speed of the speculative modes on real prompts, and by tree budget.

With --synthetic the parts of a speculative step are timed on a model and a draft of real shapes with random weights.
"""

import argparse
import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.checkpoint import open_checkpoint
from common.decode.registry import decode
from common.decode.run import PHASES, DecodeStats, Run
from common.decoders import DECODERS, Speculation
from common.errors import UsageError
from common.hub import resolve_model
from common.models.dflash import load_pair
from common.options import GenerationOptions
from common.sampling import Sampler, Sampling
from common.session import Session
from common.step import Step
from common.tokenizer import load_tokenizer
from generate.backends import open_model, placement_of
from generate.bench import announced, open_synthetic
from generate.bench_log import environment, log, machine, note
from generate.caches import cache_of, with_cache
from generate.llm import resolve_draft
from generate.synthetic_draft import synthetic_pair

PLAIN = Speculation()
NEAR_TIE = 1e-3  # of logits: what rows of different steps may differ by where their number changes a sum's order
PUBLISHED_LENGTH = 8.31  # tokens per step of Qwen3.5-27B with its draft on HumanEval, 22 nodes (Luce-Org/lucebox)


@dataclass
class Result:
    """What one way of decoding did over the prompts."""

    rates: list[float] = field(default_factory=list)  # tokens per second of each prompt
    tokens: int = 0  # after the first of each reply
    seconds: float = 0.0
    accepted: DecodeStats = field(default_factory=DecodeStats)
    different: int = 0  # texts that are not the plain one, not counting near-ties
    near_ties: int = 0

    @property
    def tps(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def run(args: argparse.Namespace) -> int:
    if args.new_tokens < 2:
        raise UsageError(f"--new-tokens is {args.new_tokens}; it must be at least 2")
    if args.budgets and args.draft is None:
        raise UsageError("--budgets needs --draft: it sweeps the tree of a draft")
    path = resolve_model(args.model)
    checkpoint = open_checkpoint(path)
    target = open_model(checkpoint, args.backend, progress=True, placement=placement_of(args))
    target = with_cache(target, cache_of(args), args.ctx or target.config.context)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    context = args.ctx or target.config.context
    prompts = [ids[: context - args.new_tokens] for ids in map(tokenizer.encode, read_prompts(args.spec, args.prompts))]
    sessions = {"off": Session(target, tokenizer, context)}
    ways = {"plain": PLAIN, "lookup": Speculation("lookup", args.tree_budget)}
    if args.draft is not None:
        drafted = Session(load_pair(resolve_draft(args.draft, True), target, True), tokenizer, context)
        for kind in (row.name for row in DECODERS.values() if row.needs_draft):
            sessions[kind] = drafted
            ways[kind] = Speculation(kind, args.tree_budget, args.tree_topk)
        ways["tree, chain first"] = Speculation("tree", args.tree_budget, args.tree_topk, seed_chain=True)
        ways |= {f"tree {n}": Speculation("tree", n, args.tree_topk) for n in args.budgets or ()}
    results = measure(sessions, ways, prompts, args.new_tokens)
    name = target.ops.name
    mean = statistics.mean(map(len, prompts))
    print(f"{path.name} on {name}, {machine(name)}")
    print(f"{len(prompts)} prompts of {mean:.0f} tokens, {args.new_tokens} new tokens each, greedy")
    table(results)
    if args.log:
        log(Path(args.log), [_row(name, path, way, r, args, mean) for way, r in results.items()])
    return 0


def read_prompts(file: str, most: int) -> list[str]:
    """The prompts of a JSON Lines file, {"prompt": text} each; the first `most`."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as a prompt file: {error}") from None
    prompts = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise UsageError(f'{file} line {number} is not {{"prompt": text}}')
        prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{file} has no prompts")
    return prompts[:most]


def options(speculation: Speculation, new_tokens: int) -> GenerationOptions:
    """Greedy decoding of `new_tokens` tokens in a speculative mode."""
    tree = "tree" in speculation.kind
    return GenerationOptions(
        max_tokens=new_tokens,
        spec=speculation.kind,
        tree_budget=speculation.budget,
        tree_topk=speculation.top_k if tree else Speculation.top_k,
        chain_seed=tree and speculation.seed_chain,
    )


def measure(
    sessions: dict[str, Session], ways: dict[str, Speculation], prompts: list[list[int]], new_tokens: int
) -> dict[str, Result]:
    """Every way over every prompt, taken in turn so that a busy machine is busy for all; the first prompt warms up."""
    results: dict[str, Result] = {way: Result() for way in ways}
    with tqdm(total=(len(prompts) + 1) * len(ways), desc="replies", leave=False, disable=None) as bar:
        for number, prompt in enumerate([prompts[0], *prompts]):
            expected: list[int] = []
            for way, speculation in ways.items():
                session = sessions.get(speculation.kind, sessions["off"])
                pieces = list(session.stream(prompt, options(speculation, new_tokens)))
                session.reset()
                bar.update()
                tokens, stats = [t for p in pieces for t in p.tokens], pieces[-1].stats
                assert stats
                expected = expected or tokens
                if not number:
                    continue
                result = results[way]
                result.rates.append(stats.decode_tps)
                result.tokens += max(stats.new_tokens - 1, 0)
                result.seconds += stats.decode_seconds
                if stats.accepted:
                    _add(result.accepted, stats.accepted)
                if tokens != expected:
                    tie = is_near_tie(sessions["off"], prompt, expected, tokens)
                    result.near_ties += tie
                    result.different += not tie
    return results


def _add(total: DecodeStats, one: DecodeStats) -> None:
    total.lengths += one.lengths
    total.budgets += one.budgets
    total.rows += one.rows
    for phase, seconds in one.seconds.items():
        total.seconds[phase] += seconds


def is_near_tie(session: Session, prompt: list[int], expected: list[int], tokens: list[int]) -> bool:
    """Were the first tokens in which two replies differ as good as equal to the model?"""
    at = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), None)
    if at is None:
        return False  # one ends where the other goes on
    row = session.logits([*prompt, *expected[:at]])[-1]
    return bool(row[expected[at]] - row[tokens[at]] < NEAR_TIE)


def table(results: dict[str, Result]) -> None:
    """What each way gained, milliseconds per step by phase, and the share of steps that accepted each place."""
    plain = results["plain"].tps
    form = "{:18} {:>11} {:>5} {:>28} {:>7} " + "{:>6} " * len(PHASES) + "{}"
    print(form.format("", "tokens/step", "rows", "tok/s (median, min..max)", "x plain", *PHASES, "ms; texts"))
    for way, r in results.items():
        steps, spread = max(r.accepted.steps, 1), f"{min(r.rates):.1f}..{max(r.rates):.1f}"
        same = "differ" if r.different else f"same but {r.near_ties} near-ties" if r.near_ties else "same"
        figures = (f"{r.accepted.length:.2f}", f"{r.accepted.rows / steps:.1f}") if r.accepted.steps else ("1", "1")
        times = [f"{1e3 * r.accepted.seconds[phase] / steps:.2f}" if r.accepted.steps else "" for phase in PHASES]
        speed = f"{statistics.median(r.rates):.1f} ({spread})", f"{r.tps / plain:.2f}"
        print(form.format(way, *figures, *speed, *times, same))
    print("accepted by place")
    for way, r in results.items():
        if r.accepted.steps:
            print(f"{way:18} " + (" ".join(f"{share:4.0%}" for share in r.accepted.by_position) or "none"))


def _row(name: str, path: Path, way: str, r: Result, args: argparse.Namespace, prompt: float) -> dict[str, Any]:
    return environment(name) | {
        "model": path.name,
        "decoder": way,
        "prompt_tokens": f"{prompt:.0f}",
        "new_tokens": args.new_tokens,
        "runs": len(r.rates),
        "decode_tps_median": f"{statistics.median(r.rates):.1f}",
        "decode_tps_min": f"{min(r.rates):.1f}",
        "decode_tps_max": f"{max(r.rates):.1f}",
        "accept_len": f"{r.accepted.length:.3f}" if r.accepted.steps else "1",
        "parity": f"{r.different} of {len(r.rates)} texts differ from plain, {r.near_ties} at near-ties",
        "verdict": args.verdict,
        "note": f"{Path(args.spec).name}; {note(args)}",
    }


# -- real shapes, random weights ---------------------------------------------------------------------------------------


def run_synthetic(args: argparse.Namespace) -> int:
    """Time the parts of a speculative step behind one context. Random weights accept next to nothing: a step is one
    token, and its speed at a published acceptance length is computed.
    """
    if args.draft != "synthetic":
        raise UsageError(f"--draft is {args.draft!r}; with --synthetic it is synthetic")
    if len(args.contexts) > 1 or args.runs < 1:
        raise UsageError("a synthetic draft takes one of --contexts and --runs of at least 1")
    context, steps = args.contexts[0], args.runs * 10
    pair = synthetic_pair(open_synthetic(args, context + 2 * steps + 40))
    ops, name = pair.ops, pair.ops.name
    print(f"{args.synthetic} with a draft of {pair.draft.layers} layers, random weights, on {name}, {machine(name)}")
    print(f"{context} tokens of context, {steps} steps each, ms per step; tok/s at {PUBLISHED_LENGTH} tokens per step")
    print(f"{'budget':>7} {'rows':>6} " + " ".join(f"{phase:>8}" for phase in (*PHASES, "total")) + f" {'tok/s':>8}")
    rows = []
    for budget in args.budgets:
        state, accepted = pair.new_state(context + 2 * steps + 40), DecodeStats()
        ids = np.random.default_rng(0).integers(0, pair.config.vocab, context).astype(np.int32)
        for at in range(0, context, ops.prefill_rows):
            chunk = ids[at : at + ops.prefill_rows]
            logits = pair.forward(state, Step.chain(chunk, at), slice(len(chunk) - 1, len(chunk)))
            state.commit(np.arange(len(chunk)))
        how = Speculation("tree", budget, args.tree_topk)
        tokens = decode(Run(pair, state, logits, Sampler(Sampling()), ids.tolist(), how, stats=accepted))
        with announced(f"{5 + steps} steps with a tree of {budget} draft tokens"):
            while accepted.steps < 5:  # launches, captures and tunes
                next(tokens)
            accepted.lengths.clear()
            accepted.rows, accepted.seconds = 0, dict.fromkeys(PHASES, 0.0)
            while accepted.steps < steps:
                next(tokens)
        tokens.close()
        ms = [1e3 * accepted.seconds[phase] / accepted.steps for phase in PHASES]
        total = sum(ms)
        speed, drawn = PUBLISHED_LENGTH / total * 1e3, accepted.rows / accepted.steps
        print(f"{budget:7} {drawn:6.1f} " + " ".join(f"{x:8.3f}" for x in (*ms, total)) + f" {speed:8.0f}", flush=True)
        rows.append(
            environment(name)
            | {
                "model": args.synthetic,
                "decoder": f"speculative step, tree {budget}",
                "context": context,
                "runs": steps,
                "accept_len": f"{accepted.length:.2f}",
                "peak_gb": f"{ops.peak_bytes() / 1e9:.2f}",
                "verdict": args.verdict,
                "note": f"{total:.3f} ms: "
                + ", ".join(f"{phase} {x:.3f}" for phase, x in zip(PHASES, ms, strict=True))
                + f"; {speed:.0f} tok/s at {PUBLISHED_LENGTH}; {note(args)}",
            }
        )
    if args.log:
        log(Path(args.log), rows)
    return 0
