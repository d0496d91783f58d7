"""`python -m generate fit MODEL`: which of a model's files fit into memory, and with how long a context."""

import argparse
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from common import hub
from common.amounts import parse_size
from common.checkpoint import INDEX, Checkpoint, open_checkpoint
from common.errors import BimetalError, UsageError
from common.expert_budget import expert_budget
from common.expert_files import expert_matrices
from common.fit import Blueprint, Need, most_tokens, predict_need, predict_weights
from common.hub_answers import Listing
from common.hub_files import choose_files, quant_label
from common.hub_headers import fetch_headers
from common.kv_cache import CacheOptions, is_auto, options_of, packed
from common.models import architecture
from common.models.drafts import predict_draft
from common.models.mtp import refuse_block
from common.ops import Ops
from common.options import CacheChoice
from common.storage import LayerSpec
from generate.backends import open_backend
from generate.caches import automatic, cache_of, cached_spec
from generate.loading import resolve_draft, with_adapters
from generate.spark import hot_budget

CONTEXTS = (4096, 32768)  # and what the model was trained for
UNCOUNTED = "not counted: the interpreter and its libraries, about 0.1 GiB"
UNCOUNTED_ON_CUDA = "not counted: CUDA's context and libraries"


@dataclass(frozen=True)
class Candidate:
    """One model of a folder or a repository: its name, and the memory it takes for a number of tokens within a limit.

    contexts  numbers of tokens at which it is judged, ascending
    stored    bytes of its tensors in the files
    cache     formats of its KV cache, from tokens and bytes of memory
    streamed  of a mixture: what is in memory with --stream-experts, on CUDA --spark, from tokens and bytes of memory
    """

    label: str
    trained: int
    contexts: list[int]
    stored: int
    backend: str
    free: tuple[int, str]
    cache: Callable[[int, int], CacheOptions]
    need: Callable[[int, int], Need]
    streamed: Callable[[int, int], str] | None


def run(args: argparse.Namespace) -> int:
    given = (parse_size(args.memory), "given by --memory") if args.memory else None
    with _checkpoints(args.model) as (paths, folder):
        cache = cache_of(args)
        candidates, refusals = _candidates(paths, args, folder, cache)
        limit, limit_from = given or candidates[0].free
        needs = {(c.label, tokens): c.need(tokens, limit) for c in candidates for tokens in c.contexts}
        formats = {(c.label, n): c.cache(n, limit).pair for c in candidates for n in c.contexts if is_auto(cache)}
        best = _best(candidates, needs, limit)
        longest = best and _longest(best, limit)
    if args.json:
        rows = [
            {"quant": at[0], "context": at[1], **asdict(need), "total": need.total, "fits": need.total <= limit}
            | ({"formats": formats[at]} if formats else {})
            for at, need in needs.items()
        ]
        best_label = best.label if best else None
        about = {"model": args.model, "backend": candidates[0].backend, "memory": limit, "best": best_label}
        print(json.dumps(about | {"longest": longest, "refused": refusals, "rows": rows}, indent=2))
        return 0
    print(
        f"{args.model} on {candidates[0].backend}: {_size(limit)}, {limit_from}; "
        f"{UNCOUNTED_ON_CUDA if candidates[0].backend == 'cuda' else UNCOUNTED}"
    )
    _table(candidates, needs, formats, limit, best)
    for label, why in refusals.items():
        print(f"{label} cannot be read: {why}")
    for candidate in candidates:
        tokens = candidate.contexts[0]
        if tokens > candidate.trained:
            print(f"{candidate.label} was trained for {candidate.trained} tokens, fewer than the {tokens} of --ctx")
        if candidate.streamed is not None and needs[candidate.label, tokens].total > limit:
            flag = "--spark" if candidate.backend == "cuda" else "--stream-experts"
            print(f"{candidate.label} with {flag}, {tokens} tokens: {candidate.streamed(tokens, limit)}")
    if best is None:
        label, tokens = min(needs, key=lambda row: needs[row].total)
        print(f"nothing fits; the least is {label} at {tokens} tokens with {_size(needs[label, tokens].total)}")
    else:
        print(f"best: {best.label}, which fits with up to {longest} tokens (trained for {best.trained})")
    return 0


# -- what there is to load ---------------------------------------------------------------------------------------------


@contextmanager
def _checkpoints(name: str) -> Iterator[tuple[dict[str, Path], str]]:
    """Map labels to the path of each model that `name` may mean; also the folder of headers alone, or ""."""
    match = hub.NAME.fullmatch(name)
    if name == "smollm2" or os.path.exists(os.path.expanduser(name)) or match is None:
        yield _local(hub.resolve_model(name)), ""
        return
    try:
        listing = hub.remote_listing(match["repo"], None)
    except hub.HubUnavailableError:
        yield _local(hub.resolve_model(name)), ""  # the cached copy, or the error
        return
    with TemporaryDirectory(prefix="bimetal-") as folder:
        entries, files = _choose(listing, match["repo"], match["file"], match["quant"])
        fetch_headers(match["repo"], listing, files, Path(folder), progress=True)
        yield {label: Path(folder, entry) for label, entry in _labelled(entries).items()}, folder


def _choose(listing: Listing, repo: str, file: str | None, quant: str | None) -> tuple[list[str], list[str]]:
    """Return the models of a repository, by the path to open ("" for its safetensors), and all files that they need."""
    if file or quant:
        files, entry = choose_files(listing.sizes, repo, file, quant)
        return [entry], files
    chosen = [choose_files(listing.sizes, repo, file=path) for path in _models(listing.sizes)]
    if not chosen or any(path.endswith(".safetensors") and "/" not in path for path in listing.sizes):
        chosen.append(choose_files(listing.sizes, repo))  # where there is neither, this says what there is
    return [entry for _, entry in chosen], [path for paths, _ in chosen for path in paths]


def _models(paths: Iterable[str]) -> list[str]:
    """List the GGUF models among files: the first part of each, without vision towers and calibration data."""
    later_part = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
    ggufs = (path for path in paths if path.endswith(".gguf") and not later_part.search(path))
    return sorted(p for p in ggufs if "mmproj" not in Path(p).name and not Path(p).name.startswith("imatrix"))


def _local(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        return {label: path for label in _labelled([path.name])}
    entries = _models(file.name for file in path.iterdir())
    if (path / "model.safetensors").exists() or (path / INDEX).exists() or not entries:
        entries.append("")
    return {label: path / entry for label, entry in _labelled(entries).items()}


def _labelled(entries: Iterable[str]) -> dict[str, str]:
    """Label paths by quantization, or by path if two share one; "" is "safetensors"."""
    labelled: dict[str, str] = {}
    for entry in entries:
        label = quant_label(entry) if entry.endswith(".gguf") else entry or "safetensors"
        labelled[entry if label in labelled else label] = entry
    return labelled


# -- what it takes -----------------------------------------------------------------------------------------------------


def _candidates(
    paths: dict[str, Path], args: argparse.Namespace, folder: str, cache: CacheChoice
) -> tuple[list[Candidate], dict[str, str]]:
    """Read the headers of models; return those that can be judged, and by label the errors of the others.

    Raises BimetalError if no model can be judged. Errors name the model as the arguments do, in place of `folder`.
    """
    candidates, refusals = [], {}
    for label, path in paths.items():
        try:
            checkpoint = with_adapters(open_checkpoint(path), args.adapter or (), True)
            refuse_block(checkpoint)
            candidates.append(_candidate(label, checkpoint, open_backend(args.backend, checkpoint), cache, args))
        except UsageError:
            raise
        except BimetalError as error:
            refusals[label] = str(error).replace(folder, args.model) if folder else str(error)
    if not candidates:
        raise BimetalError(next(iter(refusals.values())))
    return candidates, refusals


def _candidate(label: str, checkpoint: Checkpoint, ops: Ops, cache: CacheChoice, args: argparse.Namespace) -> Candidate:
    """Predict from headers what a model and its draft take, as functions of tokens and memory."""
    _, definition = architecture(checkpoint)
    config = definition.read_config(checkpoint)
    layout, stored_spec = definition.layout(config, checkpoint), definition.state_spec(config)
    spec, by_memory = cached_spec(stored_spec, cache, ops), is_auto(cache)
    weights, parallel = predict_weights(checkpoint, layout, ops), args.parallel
    path = None if args.draft is None else resolve_draft(args.draft, checkpoint, True)

    def formats(tokens: int, limit: int) -> CacheOptions:
        if not by_memory:
            return options_of(cache)
        return automatic(cache, ops, Blueprint(config, layout, stored_spec), tokens, limit - weights)

    @functools.cache
    def drafted(options: CacheOptions) -> tuple[int, list[LayerSpec]]:
        return (0, []) if path is None else predict_draft(path, checkpoint, ops, options)

    drafted(options_of(cache))  # refuses a draft of another model

    def need(tokens: int, limit: int) -> Need:
        options = formats(tokens, limit)
        drafting, draft_spec = drafted(options)
        blueprint = Blueprint(config, layout, packed(stored_spec, options))
        draft = drafting + ops.held_pool_bytes(draft_spec, parallel, tokens, tokens, ops.prefill_rows)
        alone = predict_need(ops, blueprint, tokens, weights, limit - draft, parallel)
        return replace(alone, draft=draft)

    def streamed(tokens: int, memory: int) -> str:
        budget = hot_budget if ops.name == "cuda" else expert_budget
        try:
            return str(budget(checkpoint, ops, Blueprint(config, layout, spec), tokens, memory=memory))
        except BimetalError as error:
            return str(error)

    if label == "safetensors":
        label = f"{_stored(checkpoint)} safetensors"
    trained, stored = config.context, sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    contexts = [args.ctx] if args.ctx else sorted({n for n in CONTEXTS if n < trained} | {trained})
    parts = streamed if expert_matrices(layout) else None
    return Candidate(label, trained, contexts, stored, ops.name, ops.free_bytes(), formats, need, parts)


def _stored(checkpoint: Checkpoint) -> str:
    """Name the format of most of a checkpoint's bytes: "BF16", "affine 4-bit"."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        kind = f"{tensor.type} {tensor.bits}-bit" if tensor.scales else tensor.type
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    return max(sizes, key=lambda kind: sizes[kind])


def _best(candidates: list[Candidate], needs: dict[tuple[str, int], Need], limit: int) -> Candidate | None:
    """Choose the largest weights that fit with 32768 tokens, or the limit of model or user if lower; else with fewer.

    Among weights of equal size in memory (on a backend that decodes them), choose those with the most stored bytes.
    """
    for most in reversed(CONTEXTS):
        at = {c.label: max((n for n in c.contexts if n <= most), default=c.contexts[0]) for c in candidates}
        fitting = [c for c in candidates if needs[c.label, at[c.label]].total <= limit]
        if fitting:
            return max(fitting, key=lambda c: (needs[c.label, at[c.label]].weights, c.stored))
    return None


def _longest(candidate: Candidate, limit: int) -> int:
    """Return the longest context, up to the trained one, with which the candidate fits."""
    return most_tokens(lambda tokens: candidate.need(tokens, limit).total <= limit, candidate.trained)


# -- what to print -----------------------------------------------------------------------------------------------------


def _table(
    candidates: list[Candidate],
    needs: dict[tuple[str, int], Need],
    formats: dict[tuple[str, int], str],
    limit: int,
    best: Candidate | None,
) -> None:
    """Print a row for each model and context; `formats` are of --kv auto, else {}."""
    width = max(5, *(len(c.label) for c in candidates))
    drafting = any(need.draft for need in needs.values())
    parts = "weights", "kv", "state", "work", *(["draft"] if drafting else []), "total"
    columns = "".join(f"{'KV' if part == 'kv' else part:>11}" for part in parts)
    chosen = f"  {'--kv auto':13}" if formats else ""
    print(f"{'quant':{width}} {'context':>8}{columns} {'rows':>5}{chosen}  verdict")
    for candidate in sorted(candidates, key=lambda c: (needs[c.label, c.contexts[0]].weights, c.stored)):
        for tokens in candidate.contexts:
            need = needs[candidate.label, tokens]
            cells = "".join(f"{_size(getattr(need, part)):>11}" for part in parts)
            verdict = "fits" if need.total <= limit else f"needs {_size(need.total - limit)} more"
            mark = "  <- best" if candidate is best and need.total <= limit else ""
            chosen = f"  {formats[candidate.label, tokens]:13}" if formats else ""
            print(f"{candidate.label:{width}} {tokens:8}{cells} {need.rows:5}{chosen}  {verdict}{mark}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
