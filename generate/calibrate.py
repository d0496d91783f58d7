"""`python -m generate calibrate MODEL --text FILE`: measure windows of a WeDLM model on a text, and save the best."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from common import wedlm_calibration
from common.amounts import counted
from common.checkpoint import open_checkpoint
from common.decode.calibrate import PENALTIES, TAUS, WINDOWS, Point, best, cut_prompts, grid, measure
from common.errors import BimetalError, UsageError
from common.files import check_output
from common.hub import resolve_model
from common.models import architecture
from common.tokenizer import Tokenizer, load_tokenizer
from generate.backends import open_model
from generate.bench_spec import read_prompts
from generate.perplexity import read_text

PROMPT_TOKENS = 64


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.loss < 1:
        raise UsageError(f"--loss is {args.loss}; it must be at least 0 and below 1")
    if args.prompt_tokens is not None and args.text.endswith(".jsonl"):
        raise UsageError(f"--prompt-tokens goes with a text that is cut into pieces, and {args.text} has whole prompts")
    settings = grid(args.windows or WINDOWS, args.taus or TAUS, args.lambdas or PENALTIES)
    path = resolve_model(args.model)
    checkpoint = open_checkpoint(path)
    name, definition = architecture(checkpoint)
    config = definition.read_config(checkpoint)
    if getattr(config, "mask_id", None) is None:
        raise UsageError(f"{path.name} has no windows to calibrate: {name} has no mask token")
    if not args.dry_run:
        check_output(wedlm_calibration.calibration_path(checkpoint.path), [Path(args.text)])
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    prompts = _prompts(args, tokenizer)
    longest = max(map(len, prompts)) + args.new_tokens
    if longest > config.context:
        raise UsageError(
            f"prompt and reply take {longest} tokens, and the model was trained for {config.context}; give shorter "
            "prompts (of a text by --prompt-tokens) or fewer --new-tokens"
        )
    model = open_model(checkpoint, args.backend, progress=True)
    with tqdm(total=len(prompts) * len(settings), desc="replies", leave=False, disable=None) as bar:
        points = measure(model, prompts, settings, args.new_tokens, frozenset(tokenizer.end_ids), bar.update)
    if not any(point.has_filled for point in points):
        raise BimetalError("every reply ended before a forward filled a mask; give other prompts, or more --new-tokens")
    tokens = sorted({sum(point.sizes) for point in points})
    replies = f"replies of {f'{tokens[0]} to ' if len(tokens) > 1 else ''}{counted(tokens[-1], 'token')}"
    print(f"{path.name} on {model.ops.name}, {args.text}: {counted(len(prompts), 'prompt')}, {replies} in all")
    chosen = best(points, args.loss)
    table(points, chosen)
    if chosen is None:
        raise BimetalError(
            f"no window keeps {1 - args.loss:.1%} agreement; nothing is written: allow more --loss, or "
            "use --wedlm-verify, which loses nothing"
        )
    text = Path(args.text).name
    found = wedlm_calibration.Calibration(chosen.options, chosen.agreement, chosen.tokens_per_forward, text)
    if args.dry_run:
        print(f"would keep {found}")
    else:
        print(f"kept {found}, in {wedlm_calibration.write(checkpoint.path, found)}")
    return 0


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Read the prompts of a .jsonl file, or cut them from a text."""
    if args.text.endswith(".jsonl"):
        return [tokenizer.encode(prompt) for prompt in read_prompts(args.text, args.prompts)]
    ids = tokenizer.encode(read_text(Path(args.text)), add_special_tokens=False, parse_special=False)
    return cut_prompts(ids, args.prompt_tokens or PROMPT_TOKENS, args.prompts)


def table(points: Sequence[Point], chosen: Point | None) -> None:
    """Print the points, the most tokens per forward first."""
    form = "{:>6} {:>5} {:>6} {:>5} {:>16} {:>10} {:>14} {:>10}{}"
    print(form.format("window", "tau", "lambda", "sure", "agreement", "nats/token", "tokens/forward", "rows/token", ""))
    for p in sorted(points, key=lambda p: (not p.has_filled, -p.tokens_per_forward)):
        o, agreement, mark = p.options, f"{p.agreement:.2%} ± {p.error:.2%}", "  <" if p is chosen else ""
        speed = f"{p.tokens_per_forward:.2f}" if p.has_filled else "-"
        figures = (f"{p.nats_per_token:.3f}", speed, f"{p.stats.rows_per_token:.2f}")
        print(
            form.format(
                o.window, f"{o.tau:g}", f"{o.penalty:g}", f"{o.sure:g}" if o.checks else "", agreement, *figures, mark
            )
        )
