"""Measure speculative decoding on HumanEval, GSM8K and MATH-500: acceptance by position, speed, equal texts.

    python examples/benchmarks/speculative.py --model demo --draft demo --out results/
    python examples/benchmarks/speculative.py --model M.gguf --draft D --modes chain,tree:22:first --out results/

Sets are fetched from the Hub (parquet files need `pip install pyarrow`), or read from a file: `--sets gsm8k=FILE`, a
JSON Lines or parquet file with the same columns. Any other file takes the text in its column "prompt": `--sets FILE`.
Prompts are raw text, without a chat template, drawn as `datasets.Dataset.shuffle(seed=42)` draws them.

Written are results.json, results.tsv and results.svg. Exit status 1: a text differs from that of plain decoding.
"""

import argparse
import csv
import io
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint import open_checkpoint
from common.decoders import Speculation
from common.engine import Engine
from common.errors import BimetalError, UsageError
from common.files import rewrite
from common.hub import resolve_model
from common.models.drafts import load_pair
from common.tokenizer import load_tokenizer
from generate.backends import open_model
from generate.bench_log import machine
from generate.bench_spec import Result, measure, overlap
from generate.line_plot import Line, draw
from generate.loading import resolve_draft


@dataclass(frozen=True)
class Source:
    """Where a set's file is on the Hub, and how a prompt is made of its columns."""

    repo: str
    path: str
    prompt: str


SETS = {
    "humaneval": Source("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet", "{prompt}"),
    "gsm8k": Source("openai/gsm8k", "main/test-00000-of-00001.parquet", "Question: {question}\nAnswer: "),
    "math500": Source("HuggingFaceH4/MATH-500", "test.jsonl", "Problem: {problem}\nSolution: "),
}


# -- prompts -----------------------------------------------------------------------------------------------------------


def read_set(named: str, most: int, seed: int) -> tuple[str, list[str]]:
    """The name of a set and `most` of its prompts; `named` is NAME, NAME=FILE or FILE. Raises BimetalError."""
    name, _, file = named.partition("=")
    if source := SETS.get(name):
        path, template = Path(file) if file else _fetched(source), source.prompt
    else:
        path, template = Path(named), "{prompt}"
        name = path.stem
    rows = _rows(path)
    chosen = np.random.default_rng(seed).permutation(len(rows))[:most]
    try:
        return name, [template.format(**rows[i]) for i in chosen]
    except (KeyError, TypeError) as error:
        raise BimetalError(f"{path} lacks the column {error} of the set {name}") from None


def _fetched(source: Source) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source.repo, source.path, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = type(error).__name__
        raise BimetalError(f"{source.repo}/{source.path} cannot be fetched ({why}); give a file: NAME=FILE") from None


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines or parquet file."""
    try:
        if path.suffix != ".parquet":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
    except ImportError:
        raise BimetalError(f"{path} is a parquet file, which pyarrow reads: pip install pyarrow") from None
    except (OSError, ValueError) as error:
        raise BimetalError(f"{path} cannot be read as a set of prompts: {error}") from None
    if not rows:
        raise BimetalError(f"{path} has no prompts")
    return rows


# -- measuring ---------------------------------------------------------------------------------------------------------


def mode(text: str, top_k: int) -> Speculation:
    """A mode as `--modes` names it: KIND, KIND:BUDGET or KIND:BUDGET:first. Raises UsageError."""
    kind, _, rest = text.partition(":")
    budget, _, seeded = rest.partition(":")
    if (budget and not budget.isdecimal()) or seeded not in ("", "first"):
        raise UsageError(f"--modes has {text!r}; supported: KIND, KIND:BUDGET and KIND:BUDGET:first, as in tree:22")
    return Speculation(kind, int(budget) if budget else None, top_k, seeded == "first")


def row(name: str, way: str, result: Result, plain: Result) -> dict[str, Any]:
    """What one mode did on one set."""
    accepted = result.accepted
    return {
        "set": name,
        "mode": way,
        "prompts": result.replies,
        "acceptance_length": round(accepted.length, 4) if accepted.steps else 1.0,
        "mean_of_prompts": round(statistics.mean(result.lengths), 4) if result.lengths else 1.0,
        "by_position": [round(share, 4) for share in accepted.by_position],
        "rows_per_step": round(accepted.rows / accepted.steps, 2) if accepted.steps else 1.0,
        "tokens_per_second": round(result.tps, 2) if result.tps else None,
        "times_plain": round(result.tps / plain.tps, 3) if plain.tps and result.tps else None,
        "different_texts": result.different,
        "near_ties": result.near_ties,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all sets; the content of results.json."""
    ways = {"plain": Speculation()} | {text: mode(text, args.tree_topk) for text in args.modes.split(",")}
    sets = dict(read_set(named, args.prompts, args.shuffle) for named in args.sets.split(","))
    path = resolve_model(args.model)
    checkpoint = open_checkpoint(path)
    draft = resolve_draft(args.draft, checkpoint, True)
    target = open_model(checkpoint, args.backend, progress=True)
    pair = load_pair(draft, target, True)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    context = args.ctx or target.config.context
    plain, drafted = Engine(target, tokenizer, context), Engine(pair, tokenizer, context)
    engines = {way.kind: drafted if way.decoder.needs_draft else plain for way in ways.values()}
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    rows, allowed = [], {}
    for name, texts in sets.items():
        prompts = [tokenizer.encode(text)[: context - args.new_tokens] for text in texts]
        results = measure(engines, ways, prompts, args.new_tokens, **sampling)
        rows += [row(name, way, result, results["plain"]) for way, result in results.items()]
        if args.temperature > 0:
            allowed[name] = overlap(drafted, prompts, args.new_tokens, **sampling).shares()
    return {
        "model": args.model,
        "draft": args.draft,
        "backend": target.ops.name,
        "machine": machine(target.ops.name),
        "new_tokens": args.new_tokens,
        **sampling,
        "rows": rows,
        "first_draft_token": allowed,
    }


# -- results -----------------------------------------------------------------------------------------------------------


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Write results.json, results.tsv and results.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    rewrite(folder / "results.json", json.dumps(results, indent=1) + "\n")
    out = io.StringIO()
    table = csv.DictWriter(out, list(results["rows"][0]), delimiter="\t", lineterminator="\n")
    table.writeheader()
    table.writerows(each | {"by_position": " ".join(map(str, each["by_position"]))} for each in results["rows"])
    rewrite(folder / "results.tsv", out.getvalue())
    panels = []
    for name in dict.fromkeys(each["set"] for each in results["rows"]):
        found = [each for each in results["rows"] if each["set"] == name and each["by_position"]]
        lines = [Line(r["mode"], range(1, len(r["by_position"]) + 1), r["by_position"]) for r in found]
        if lines:
            panels.append((f"{name}: position of the draft token", "share of steps that accept it", lines))
    if panels:
        rewrite(folder / "results.svg", draw(f"{Path(results['model']).name} on {results['backend']}", *panels))


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="demo")
    p.add_argument("--draft", default="demo")
    p.add_argument("--backend", choices=("cuda", "mlx", "numpy"))
    p.add_argument("--sets", default="humaneval,gsm8k,math500", help="default: %(default)s")
    p.add_argument("--modes", default="chain,tree", help="KIND[:BUDGET[:first]], default: %(default)s")
    p.add_argument("--tree-topk", type=int, default=8)
    p.add_argument("--prompts", type=int, default=10, help="of each set, default: %(default)s")
    p.add_argument("--shuffle", type=int, default=42, help="seed of the choice of prompts, default: %(default)s")
    p.add_argument("--new-tokens", type=int, default=256, help="default: %(default)s")
    p.add_argument("--ctx", type=int)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--out", type=Path, default=Path("results"))
    args = p.parse_args(argv)
    try:
        results = run(args)
        write(results, args.out)
    except (BimetalError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for each in results["rows"]:
        speed = each["tokens_per_second"] or "-"
        print("{set:12} {mode:16} {acceptance_length:6.2f} tokens/step {speed:>8} tok/s".format(**each, speed=speed))
    for name, shares in results["first_draft_token"].items():
        print(f"{name:12} first draft token: " + ", ".join(f"{what} {share:.3f}" for what, share in shares.items()))
    return int(any(each["different_texts"] for each in results["rows"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
