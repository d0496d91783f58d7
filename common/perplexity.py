"""Measure the perplexity of a model over a text, and the KL divergence of its distributions from a reference's.

The convention is that of llama.cpp's `llama-perplexity`: the text is cut into windows of N tokens. Each window is read
from an empty state, and its second half is scored, so that every scored token has a context of at least N // 2 tokens.
A window begins with the beginning-of-text token if the tokenizer adds one, and an incomplete last window is omitted.

No array of size (tokens, vocabulary) is held in memory: log-probabilities are processed in blocks of a few rows.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.amounts import counted, shown_size
from common.errors import BimetalError, UsageError
from common.files import rewriting
from common.ops import Array, Ops
from common.safetensors import read_safetensors
from common.step import State, Step

MIN_WINDOW = 4
STEP_ROWS = 512  # rows of a step
STEP_LOGITS = 1 << 25  # logits that a step returns: 128 MiB of float32
BLOCK_LOGITS = 1 << 22  # log-probabilities compared at once: 32 MiB of float64
CODE_NATS = 32 / 65535  # unit of a saved log-probability, below its row's best; the last code is e^-32


class LanguageModel(Protocol):
    """The methods of `common.models.Model` that this file calls."""

    @property
    def ops(self) -> Ops: ...
    @property
    def config(self) -> Any: ...
    def new_state(self, capacity: int) -> State: ...
    def forward(self, state: State, step: Step, rows: slice) -> Array: ...


class Block(NamedTuple):
    """n scored rows.

    targets   (n,) int32: the actual tokens
    logprobs  (n, vocab) float64: natural log-probabilities before them
    best      (n,) int32: the most probable tokens
    """

    targets: np.ndarray
    logprobs: np.ndarray
    best: np.ndarray

    @property
    def nll(self) -> np.ndarray:
        """Return the negative log-likelihoods of the targets, (n,) in nats."""
        return -self.logprobs[np.arange(len(self.targets)), self.targets]


@dataclass(frozen=True)
class Estimate:
    """A mean over the scored tokens (perplexity: its exponential), and its standard error for independent tokens."""

    value: float
    error: float


@dataclass(frozen=True)
class Agreement:
    """Distance of a model from a reference, over the scored rows.

    perplexity  of the reference
    kl          mean KL(reference || model) in nats; kl_99 is its 99th percentile
    top1        share of rows whose most probable token is the reference's
    """

    perplexity: Estimate
    kl: Estimate
    kl_99: float
    top1: Estimate


@dataclass(frozen=True)
class Result:
    """perplexity = exp(mean negative log-likelihood) over `scored` tokens."""

    scored: int
    perplexity: Estimate
    agreement: Agreement | None


def cut_windows(ids: Sequence[int], size: int, bos: int | None = None) -> np.ndarray:
    """Return the whole windows of a text's token ids: (windows, size) int32.

    bos  is put before the text, and replaces the first token of every window
    """
    if size < MIN_WINDOW:
        raise UsageError(
            f"a window of {counted(size, 'token')} is too short to score half of it; it needs {MIN_WINDOW}"
        )
    ids = list(ids) if bos is None else [bos, *ids]
    if len(ids) < size:
        raise BimetalError(
            f"the text has {counted(len(ids), 'token')}, and one window takes {size}; give a longer text or a smaller "
            "window"
        )
    count = len(ids) // size
    windows = np.array(ids[: count * size], np.int32).reshape(count, size)
    if bos is not None:
        windows[:, 0] = bos
    return windows


def scored_rows(size: int) -> slice:
    """Return the rows of a window whose next token is scored."""
    return slice(size // 2, size - 1)


def scored_targets(windows: np.ndarray) -> np.ndarray:
    """Return the scored tokens of all windows, in order: (n,) int32."""
    rows = scored_rows(windows.shape[1])
    return windows[:, rows.start + 1 : rows.stop + 1].ravel()


def score(model: LanguageModel, windows: np.ndarray) -> Iterator[Block]:
    """Read the windows (W, N) and yield their scored rows in order. Raises BimetalError for NaN or infinite logits."""
    vocab, size = model.config.vocab, windows.shape[1]
    if windows.min() < 0 or windows.max() >= vocab:
        raise BimetalError(f"token id {windows.max()} of the text is outside the model's vocabulary of {vocab}")
    scored = scored_rows(size)
    for window in windows:
        state = model.new_state(size)
        for start, end in _steps(scored, vocab):
            is_scored = start >= scored.start
            rows = slice(0, end - start if is_scored else 0)
            logits = model.forward(state, Step.chain(window[start:end], start), rows)
            if is_scored:
                values = model.ops.read(logits)
                for at in _blocks(len(values), vocab):
                    yield _block(values[at], window[start + 1 + at.start : start + 1 + at.stop], start + at.start)
            state.commit(np.arange(end - start))


def _steps(scored: slice, vocab: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each step over a window: first the rows before the scored ones, then the scored ones."""
    for first, last, rows in (
        (0, scored.start, STEP_ROWS),
        (scored.start, scored.stop, min(STEP_ROWS, max(1, STEP_LOGITS // vocab))),
    ):
        for start in range(first, last, rows):
            yield start, min(start + rows, last)


def _blocks(rows: int, vocab: int) -> Iterator[slice]:
    size = max(1, BLOCK_LOGITS // vocab)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _block(logits: np.ndarray, targets: np.ndarray, position: int) -> Block:
    finite = np.isfinite(logits).all(axis=-1)
    if not finite.all():
        raise BimetalError(f"the logits at position {position + int(finite.argmin())} of a window are not finite")
    return Block(targets, _log_softmax(logits.astype(np.float64)), logits.argmax(axis=-1).astype(np.int32))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Convert logits (n, vocab) float64 to log-probabilities, in place."""
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return logits


def measure(blocks: Iterable[Block], reference: Iterable[Block] | None = None) -> Result:
    """Return the figures over all blocks; `reference` gives blocks of the same rows, in the same or other sizes."""
    nll, nll_reference, kl, same = [], [], [], []
    others = _Rows(reference) if reference is not None else None
    for block in blocks:
        nll.append(block.nll)
        if others is not None:
            for part, other in others.beside(block):
                nll_reference.append(other.nll)
                kl.append((np.exp(other.logprobs) * (other.logprobs - part.logprobs)).sum(axis=-1))
                same.append(part.best == other.best)
    agreement = None
    if others is not None:
        divergence = np.concatenate(kl)
        agreement = Agreement(
            _perplexity(np.concatenate(nll_reference)),
            _mean(divergence),
            float(np.quantile(divergence, 0.99)),
            _mean(np.concatenate(same)),
        )
    all_nll = np.concatenate(nll)
    return Result(len(all_nll), _perplexity(all_nll), agreement)


class _Rows:
    """Pairs up blocks that two sources may cut differently."""

    def __init__(self, blocks: Iterable[Block]):
        self.blocks = iter(blocks)
        self.rest: Block | None = None

    def beside(self, block: Block) -> Iterator[tuple[Block, Block]]:
        at = 0
        while at < len(block.targets):
            other = self.rest or next(self.blocks)
            n = min(len(block.targets) - at, len(other.targets))
            part, head = Block(*(x[at : at + n] for x in block)), Block(*(x[:n] for x in other))
            if not np.array_equal(part.targets, head.targets):
                raise BimetalError("the model and the reference were scored on different tokens")
            self.rest = Block(*(x[n:] for x in other)) if n < len(other.targets) else None
            at += n
            yield part, head


def _mean(values: np.ndarray) -> Estimate:
    values = values.astype(np.float64)
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return Estimate(float(values.mean()), float(error))


def _perplexity(nll: np.ndarray) -> Estimate:
    mean = _mean(nll)
    value = float(np.exp(mean.value))
    return Estimate(value, value * mean.error)


# -- saved references --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A model's scored rows on disk: a safetensors file.

    model    name of the model
    windows  (W, N) int32: the tokens that were read
    best     (n,) int32: the most probable token of each scored row
    codes    (n, vocab) uint16, memory-mapped: how many steps of CODE_NATS a log-probability is below its row's best;
             the error is at most 0.00025 nats, and the minimum probability e^-32 of the best
    """

    model: str
    windows: np.ndarray
    best: np.ndarray
    codes: np.ndarray

    def blocks(self) -> Iterator[Block]:
        targets = scored_targets(self.windows)
        for at in _blocks(len(self.best), self.codes.shape[1]):
            logprobs = _log_softmax(self.codes[at] * -CODE_NATS)
            yield Block(targets[at], logprobs, self.best[at])


def save(path: Path, model: str, windows: np.ndarray, vocab: int, blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield `blocks` unchanged, and write them to a reference file at `path`; BimetalError if the disk is full."""
    rows = windows.shape[0] * len(range(*scored_rows(windows.shape[1]).indices(windows.shape[1])))
    name = np.frombuffer(model.encode(), np.uint8)
    entries = {  # the widest dtypes first, so that all entries are aligned
        "windows": ("I32", windows.shape, windows.nbytes),
        "best": ("I32", (rows,), 4 * rows),
        "codes": ("U16", (rows, vocab), 2 * rows * vocab),
        "model": ("U8", name.shape, name.nbytes),
    }
    header, end = {}, 0
    for key, (dtype, shape, nbytes) in entries.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    free = shutil.disk_usage(Path(os.path.realpath(path)).parent).free
    if end > free and (path.is_file() or not path.exists()):
        raise BimetalError(
            f"the log-probabilities of {rows} tokens over a vocabulary of {vocab} take {shown_size(end)}, and the "
            f"disk of {path} has {shown_size(free)} free; score fewer tokens"
        )
    with rewriting(path) as file:
        file.write(len(text).to_bytes(8, "little") + text + windows.astype("<i4").tobytes())
        best_at = file.tell()
        file.write(bytes(4 * rows))
        for block in blocks:
            below = block.logprobs.max(axis=-1, keepdims=True) - block.logprobs
            file.write(np.minimum(np.rint(below / CODE_NATS), 65535).astype("<u2").tobytes())
            codes_at = file.tell()
            file.seek(best_at)
            best_at += file.write(block.best.astype("<i4").tobytes())
            file.seek(codes_at)
            yield block
        file.write(name.tobytes())


def open_saved(path: Path) -> Saved:
    """Return the reference file at `path`; raises BimetalError if it is none."""
    tensors = read_safetensors(path)
    if set(tensors) != {"windows", "best", "codes", "model"}:
        raise BimetalError(f"{path} is not a saved reference: it has tensors {', '.join(sorted(tensors)[:5])}")
    windows, best, codes = (
        tensors[name].data.view(dtype).reshape(tensors[name].shape)
        for name, dtype in (("windows", "<i4"), ("best", "<i4"), ("codes", "<u2"))
    )
    if windows.ndim != 2 or windows.shape[1] < MIN_WINDOW or codes.ndim != 2 or best.shape != codes.shape[:1]:
        raise BimetalError(
            f"{path} is not a saved reference: its shapes are {windows.shape}, {best.shape}, {codes.shape}"
        )
    if len(scored_targets(windows)) != len(best):
        raise BimetalError(f"{path} has {len(best)} rows for {len(scored_targets(windows))} scored tokens")
    return Saved(tensors["model"].data.tobytes().decode(errors="replace"), windows, best, codes)


def check_saved(saved: Saved, path: Path, windows: np.ndarray, vocab: int) -> None:
    """Refuse a reference over another vocabulary or other tokens than `windows`."""
    if saved.codes.shape[1] != vocab:
        raise BimetalError(
            f"{path} is over a vocabulary of {saved.codes.shape[1]} tokens ({saved.model}), the model's has {vocab}"
        )
    if saved.windows.shape != windows.shape:
        raise BimetalError(
            f"{path} has {saved.windows.shape[0]} windows of {saved.windows.shape[1]} tokens ({saved.model}), this "
            f"text gives {windows.shape[0]} of {windows.shape[1]}"
        )
    if not np.array_equal(saved.windows, windows):
        at = int((saved.windows != windows).argmax())
        raise BimetalError(
            f"{path} was made from another text or tokenizer ({saved.model}): token {at} is {saved.windows.flat[at]} "
            f"there and {windows.flat[at]} here"
        )
