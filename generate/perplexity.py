"""`python -m generate perplexity MODEL --text FILE`: perplexity of a text, and KL divergence from another model."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common.amounts import counted
from common.checkpoint import files_of, open_checkpoint
from common.checks import check_head
from common.errors import BimetalError, UsageError
from common.files import check_output
from common.hub import resolve_model
from common.models import Model
from common.perplexity import (
    Block,
    Estimate,
    Result,
    check_saved,
    cut_windows,
    measure,
    open_saved,
    save,
    score,
    scored_targets,
)
from common.storage import all_specs, grows
from common.tokenizer import Tokenizer, load_tokenizer
from generate.backends import open_model, placement_of, with_rope
from generate.caches import cache_of, with_cache
from generate.loading import with_adapters

WINDOW = 512


def run(args: argparse.Namespace) -> int:
    text, cache = read_text(Path(args.text)), cache_of(args)
    path = resolve_model(args.model)
    if args.save_reference:
        check_output(Path(args.save_reference), [Path(args.text), *files_of(path)])
    model, tokenizer = _load(path, args, args.adapter or ())
    size = window_size(args, model)
    model = with_cache(model, cache, size)
    ids = _tokens(tokenizer, text)
    windows = cut_windows(ids[: args.max_tokens], size, tokenizer.bos_id if tokenizer.add_bos else None)
    if size <= (exact := _exact_tokens(model)):
        print(
            f"the cache of {model.cache} reads windows of up to {exact} tokens exactly, without a loss to measure; "
            f"choose a --ctx-window above {exact}",
            file=sys.stderr,
        )
    reference_name, reference = _reference(args, model, text, ids, windows)
    blocks = score(model, windows)
    if args.save_reference:
        blocks = save(Path(args.save_reference), path.name, windows, model.config.vocab, blocks)
    result = measure(_with_bar(blocks, len(scored_targets(windows))), reference)
    if args.json:
        print(json.dumps(_as_json(path, model, args, windows, result, reference_name), indent=2))
    else:
        _print(path, model, args, windows, result, reference_name)
    return 0


def window_size(args: argparse.Namespace, model: Any) -> int:
    """Return the tokens of a window: --ctx-window, by default 512 or the context that the model was trained for."""
    size: int = min(WINDOW, model.config.context) if args.ctx_window is None else args.ctx_window
    if size > model.config.context:
        raise UsageError(f"--ctx-window is {size}, and the model was trained for {model.config.context} tokens")
    return size


def read_text(path: Path) -> str:
    """Return the text of a file; raises BimetalError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BimetalError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _load(path: Path, args: argparse.Namespace, adapters: Sequence[str] = ()) -> tuple[Model, Tokenizer]:
    checkpoint = with_adapters(open_checkpoint(path), adapters, True)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    model = open_model(checkpoint, args.backend, progress=True, placement=placement_of(args))
    check_head(model.config)
    return with_rope(model, window_size(args, model)), tokenizer


def _exact_tokens(model: Model) -> int:
    """Return the length up to which a compressed cache still holds all tokens of a sequence exactly."""
    return min((s.packing.exact for s in all_specs(model.state_spec) if grows(s) and s.is_packed), default=0)


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _reference(
    args: argparse.Namespace, model: Model, text: str, ids: list[int], windows: np.ndarray
) -> tuple[str | None, Iterator[Block] | None]:
    """Return the name and the scored rows of the reference model, if the flags name one."""
    if args.reference_file:
        file = Path(args.reference_file)
        saved = open_saved(file)
        check_saved(saved, file, windows, model.config.vocab)
        return saved.model, saved.blocks()
    if args.reference:
        path = resolve_model(args.reference)
        other, tokenizer = _load(path, args)
        if other.config.vocab != model.config.vocab:
            raise BimetalError(
                f"{path} has a vocabulary of {other.config.vocab} tokens and the model one of {model.config.vocab}; "
                "only models of one vocabulary can be compared"
            )
        if (theirs := _tokens(tokenizer, text)) != ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), min(len(ids), len(theirs))
            )
            raise BimetalError(
                f"{path} has another tokenizer than the model: it reads {counted(len(theirs), 'token')} instead of "
                f"{len(ids)} in the text, and token {at} is the first to differ"
            )
        return path.name, score(other, windows)
    return None, None


def _with_bar(blocks: Iterable[Block], total: int) -> Iterator[Block]:
    with tqdm(total=total, desc="scoring", unit="token", leave=False, disable=None) as bar:
        for block in blocks:
            yield block
            bar.update(len(block.targets))


def _as_json(
    path: Path, model: Model, args: argparse.Namespace, windows: np.ndarray, result: Result, reference: str | None
) -> dict:
    count, size = windows.shape
    about = {
        "model": str(path),
        "backend": model.ops.name,
        "cache": str(model.cache),
        "text": args.text,
        "tokens": windows.size,
    }
    return about | {"windows": count, "window": size, "reference": reference} | asdict(result)


def _print(
    path: Path, model: Model, args: argparse.Namespace, windows: np.ndarray, result: Result, reference: str | None
) -> None:
    count, size = windows.shape
    cache = f", cache of {model.cache}" if model.cache.compresses else ""
    print(f"{path.name} on {model.ops.name}{cache}, {args.text}")
    print(
        f"{windows.size} tokens in {counted(count, 'window')} of {size}; {result.scored} scored, "
        "the second half of each window"
    )
    print(f"perplexity  {_shown(result.perplexity)}")
    if (a := result.agreement) is not None:
        print(f"against {reference}")
        print(f"  its perplexity  {_shown(a.perplexity)}")
        print(f"  mean KL         {a.kl.value:.6f} ± {a.kl.error:.6f} nats")
        print(f"  99 % KL         {a.kl_99:.6f} nats")
        print(f"  same top token  {a.top1.value:.2%} ± {a.top1.error:.2%}")
    if args.save_reference:
        print(f"saved as a reference in {args.save_reference}")


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.4f} ± {estimate.error:.4f}"
