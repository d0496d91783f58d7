"""`python -m generate bench --spec-prompts FILE`: speed of the speculative modes, and by tree budget."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.amounts import counted
from common.checkpoint import open_checkpoint
from common.checks import default_spec
from common.decode.run import PHASES, WEDLM_PHASES, DecodeStats, WedlmStats
from common.decoders import DECODERS, PRESETS, Speculation, WedlmOptions
from common.engine import Engine
from common.errors import UsageError
from common.hub import resolve_model
from common.models.drafts import load_pair
from common.models.pair import Pair
from common.options import GenerationOptions, Sampling
from common.scores import completed, logits_of
from common.tokenizer import load_tokenizer
from generate.backends import open_model, placement_of
from generate.bench_log import environment, log, machine, note
from generate.bench_options import SpecBench
from generate.bench_overlap import Overlap, add_text
from generate.caches import with_cache
from generate.loading import resolve_draft

PLAIN = Speculation()
WINDOWS = {f"wedlm {name}": Speculation("wedlm", wedlm=preset) for name, preset in PRESETS.items()}
WINDOWS["wedlm verify"] = Speculation("wedlm", wedlm=WedlmOptions(16, 1.0, 0.0, verify=True))
NEAR_TIE = 1e-3  # difference of logits by rounding between steps of different numbers of rows


@dataclass
class Result:
    """Measurements of one way of decoding over the prompts."""

    replies: int = 0
    rates: list[float] = field(default_factory=list)  # tokens per second of each reply that took several steps
    tokens: int = 0  # after the first step of each reply
    seconds: float = 0.0
    accepted: DecodeStats = field(default_factory=DecodeStats)
    wedlm: WedlmStats = field(default_factory=WedlmStats)
    different: int = 0  # texts that are not the plain one, not counting near-ties
    near_ties: int = 0
    lengths: list[float] = field(default_factory=list)  # the acceptance length of each prompt

    @property
    def tps(self) -> float:
        """Return tokens per second of all replies; 0 if every reply took one step."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def speed(self) -> tuple[str, str, str]:
        """Return median, minimum and maximum of the rates in words; "" if every reply took one step."""
        if not self.rates:
            return "", "", ""
        return f"{statistics.median(self.rates):.1f}", f"{min(self.rates):.1f}", f"{max(self.rates):.1f}"

    @property
    def steps(self) -> int:
        return self.accepted.steps or self.wedlm.forwards

    @property
    def length(self) -> float:
        """Return tokens per step; for a WeDLM model, tokens per forward that filled a position."""
        return self.wedlm.tokens_per_forward if self.wedlm.forwards else self.accepted.length if self.steps else 1.0


def run(options: SpecBench) -> int:
    path = resolve_model(options.model)
    checkpoint = open_checkpoint(path)
    draft = None if options.draft is None else resolve_draft(options.draft, checkpoint, True)
    target = open_model(checkpoint, options.backend, progress=True, placement=placement_of(options))
    target = with_cache(target, options.cache, options.ctx or target.config.context)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    context = options.ctx or target.config.context
    prompts = [
        ids[: context - options.new_tokens]
        for ids in map(tokenizer.encode, read_prompts(options.spec_prompts, options.prompts))
    ]
    engines = {"off": Engine(target, tokenizer, context)}
    ways = _ways(options, default_spec(target) == "wedlm")
    if draft is not None:
        drafted = Engine(load_pair(draft, target, True), tokenizer, context)
        engines |= dict.fromkeys((row.name for row in DECODERS.values() if row.needs_draft), drafted)
    results = measure(engines, ways, prompts, options.new_tokens, **options.sampling)
    name = target.ops.name
    mean = statistics.mean(map(len, prompts))
    print(f"{path.name} on {name}, {machine(name)}")
    print(
        f"{counted(len(prompts), 'prompt')} of {mean:.0f} tokens, {options.new_tokens} new tokens each, "
        f"{_words(options)}"
    )
    table(results)
    if draft is not None and options.temperature > 0:
        shares = overlap(drafted, prompts, options.new_tokens, **options.sampling).shares()
        print("first draft token: " + ", ".join(f"{what} {share:.3f}" for what, share in shares.items()))
    if options.log:
        log(Path(options.log), [_row(name, path, way, r, options, mean) for way, r in results.items()])
    return 0


def _ways(options: SpecBench, is_wedlm: bool) -> dict[str, Speculation]:
    """List the ways of decoding to compare, by name; prints which windows are left out."""
    ways = {"plain": PLAIN, "lookup": Speculation("lookup", options.tree_budget)}
    for way, each in WINDOWS.items() if is_wedlm else ():
        if options.temperature > 0 and (each.wedlm.checks or each.wedlm.verify):
            print(f"left out: {way}, which needs greedy decoding", file=sys.stderr)
        else:
            ways[way] = each
    if options.draft is not None:
        sizes = options.tree_budget, options.tree_topk
        ways |= {row.name: Speculation(row.name, *sizes) for row in DECODERS.values() if row.needs_draft}
        ways["tree, chain first"] = Speculation("tree", *sizes, seed_chain=True)
        ways |= {f"tree {n}": Speculation("tree", n, options.tree_topk) for n in options.budgets or ()}
    return ways


def read_prompts(file: str, max_prompts: int) -> list[str]:
    """Return the prompts of a JSON Lines file, {"prompt": text} each; the first `max_prompts`."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")  # a text may have other line ends in it
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 at byte {error.start}"
        raise UsageError(f"{file} cannot be read as a prompt file: {why}") from None
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
    return prompts[:max_prompts]


def generation_options(speculation: Speculation, new_tokens: int, **sampling: Any) -> GenerationOptions:
    """Return options that decode `new_tokens` tokens in a speculative mode, greedy unless `sampling` says otherwise."""
    tree = "tree" in speculation.kind
    window: dict[str, Any] = {}
    if speculation.kind == "wedlm":
        w = speculation.wedlm
        window = {"window": w.window, "tau": w.tau, "lambda": w.penalty, "sure": w.sure}
        window |= {"verify": w.verify, "order": w.order}
    return GenerationOptions(
        max_tokens=new_tokens,
        spec=speculation.kind,
        tree_budget=speculation.budget,
        tree_topk=speculation.top_k if tree else Speculation.top_k,
        chain_seed=tree and speculation.seed_chain,
        **{f"wedlm_{name}": value for name, value in window.items()},
        **sampling,
    )


def measure(
    engines: dict[str, Engine],
    ways: dict[str, Speculation],
    prompts: list[list[int]],
    new_tokens: int,
    **sampling: Any,
) -> dict[str, Result]:
    """Measure every way of decoding over every prompt. The first prompt warms up.

    A prompt is decoded in all ways before the next one, so that other load of the machine affects all ways alike.

    The first way decodes plainly. With a temperature, the seed of a prompt is its number.

    engines  by the decoder that each runs; "off" runs every other one
    """
    is_greedy = not sampling.get("temperature")
    results: dict[str, Result] = {way: Result() for way in ways}
    with tqdm(total=(len(prompts) + 1) * len(ways), desc="replies", leave=False, disable=None) as bar:
        for number, prompt in enumerate([prompts[0], *prompts]):
            expected: list[int] = []
            for way, speculation in ways.items():
                engine = engines.get(speculation.kind, engines["off"])
                options = generation_options(speculation, new_tokens, seed=number, **sampling)
                pieces = list(engine.stream(prompt, options))
                engine.reset()
                bar.update()
                tokens, stats = [t for p in pieces for t in p.tokens], pieces[-1].stats
                assert stats
                expected = expected or tokens
                if not number:
                    continue
                result = results[way]
                result.replies += 1
                if stats.timed_tokens:
                    result.rates.append(stats.decode_tps)
                    result.tokens += stats.timed_tokens
                    result.seconds += stats.decode_seconds
                if stats.accepted:
                    _add(result.accepted, stats.accepted)
                    result.lengths.append(stats.accepted.length)
                if stats.wedlm:
                    result.wedlm.add(stats.wedlm)
                if tokens != expected:
                    tie = is_greedy and is_near_tie(engines["off"], prompt, expected, tokens)
                    result.near_ties += tie
                    result.different += not tie
    return results


def overlap(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, **sampling: Any) -> Overlap:
    """Count how often the first draft token of a pair's engine is the sampled one, on texts of plain decoding."""
    total, pair = Overlap(), engine.model
    assert isinstance(pair, Pair)
    for seed, prompt in enumerate(prompts, 1):
        pieces = list(engine.stream(list(prompt), generation_options(PLAIN, new_tokens, seed=seed, **sampling)))
        engine.reset()
        text = [token for piece in pieces for token in piece.tokens]
        add_text(total, pair, prompt, text, Sampling(seed=seed, **sampling))
    return total


def _words(options: SpecBench, greedy: str = "greedy") -> str:
    return greedy if options.temperature == 0 else f"temperature {options.temperature:g}, top-p {options.top_p:g}"


def _add(total: DecodeStats, one: DecodeStats) -> None:
    total.lengths += one.lengths
    total.budgets += one.budgets
    total.rows += one.rows
    for phase, seconds in one.seconds.items():
        total.seconds[phase] += seconds


def is_near_tie(engine: Engine, prompt: list[int], expected: list[int], tokens: list[int]) -> bool:
    """Test whether the logits of the first tokens in which two replies differ are within NEAR_TIE."""
    at = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), None)
    if at is None:
        return False  # one ends where the other goes on
    row = completed(logits_of(engine.model, [*prompt, *expected[:at]], engine.target.context))[-1]
    return bool(row[expected[at]] - row[tokens[at]] < NEAR_TIE)


def table(results: dict[str, Result]) -> None:
    """Tabulate each way's gain, milliseconds per step by phase, and the share of steps that accepted each position."""
    plain = results["plain"].tps
    form = "{:18} {:>11} {:>5} {:>28} {:>7} " + "{:>6} " * len(PHASES) + "{}"
    print(form.format("", "tokens/step", "rows", "tok/s (median, min..max)", "x plain", *PHASES, "ms; texts"))
    for way, r in results.items():
        steps, (median, least, most) = max(r.steps, 1), r.speed
        same = "differ" if r.different else f"same but {r.near_ties} near-ties" if r.near_ties else "same"
        figures = f"{r.length:.2f}", f"{(r.accepted.rows + r.wedlm.rows) / steps:.1f}" if r.steps else "1"
        times = [f"{1e3 * r.accepted.seconds[phase] / steps:.2f}" if r.accepted.steps else "" for phase in PHASES]
        speed = f"{median} ({least}..{most})" if median else "-", f"{r.tps / plain:.2f}" if median and plain else "-"
        print(form.format(way, *figures, *speed, *times, same))
    if short := {way: r.replies - len(r.rates) for way, r in results.items() if r.replies > len(r.rates)}:
        print(f"replies of one step, left out of tok/s: {', '.join(f'{way} {n}' for way, n in short.items())}")
    _windows({way: r.wedlm for way, r in results.items() if r.wedlm.forwards})
    print("accepted by position")
    for way, r in results.items():
        if r.accepted.steps:
            print(f"{way:18} " + (" ".join(f"{share:4.0%}" for share in r.accepted.by_position) or "none"))


def _windows(stats: dict[str, WedlmStats]) -> None:
    """Tabulate what forwards of a WeDLM model cost, in rows and by phase."""
    if not stats:
        return
    phases = " ".join(f"{phase:>8}" for phase in WEDLM_PHASES)
    print(f"{'windows':18} {'rows/token':>11} {'p_cache':>8} {phases} ms/forward")
    for way, w in stats.items():
        times = " ".join(f"{1e3 * w.seconds[phase] / w.forwards:8.2f}" for phase in WEDLM_PHASES)
        print(f"{way:18} {w.rows_per_token:11.2f} {w.cache_share:8.2f} {times}")


def _row(name: str, path: Path, way: str, r: Result, options: SpecBench, prompt: float) -> dict[str, Any]:
    w = r.wedlm
    median, least, most = r.speed
    counts = f"; {w.rows_per_token:.2f} rows per token, p_cache {w.cache_share:.2f}" if w.forwards else ""
    return environment(name) | {
        "model": path.name,
        "decoder": way,
        "prompt_tokens": f"{prompt:.0f}",
        "new_tokens": options.new_tokens,
        "runs": r.replies,
        "decode_tps_median": median,
        "decode_tps_min": least,
        "decode_tps_max": most,
        "accept_len": f"{r.length:.3f}" if r.steps else "1",
        "parity": f"{r.different} of {r.replies} texts differ from plain, {r.near_ties} at near-ties",
        "verdict": options.verdict,
        "note": "; ".join(
            filter(None, (f"{Path(options.spec_prompts).name}{counts}", _words(options, greedy=""), note(options)))
        ),
    }
