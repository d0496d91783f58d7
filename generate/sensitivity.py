"""`generate quantize MODEL --sensitivity --text FILE`: the loss by quantizing one kind of matrix at a time."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.sax.saxutils import escape

import numpy as np
from tqdm import tqdm

from common.checkpoint import files_of
from common.checks import check_head
from common.errors import UsageError
from common.files import check_output, rewrite
from common.models import Model
from common.perplexity import Agreement, cut_windows, measure, open_saved, save, score
from common.quantize import Format, encode
from common.quants import dequantize
from common.recipe import Weight, choose
from common.tokenizer import load_tokenizer
from common.weights import dense
from generate.backends import open_model
from generate.perplexity import read_text, window_size
from generate.quantize_job import Job

BAR, LABEL, ROW = 420, 200, 22  # pixels of the plot: longest bar, room for names, height of a row


@dataclass(frozen=True)
class Cost:
    """Loss and saving by quantizing one kind of matrix.

    saved       bytes saved
    perplexity  of the model with this kind quantized
    agreement   with the source model
    """

    kind: str
    matrices: int
    values: int
    bits: float
    saved: int
    perplexity: float
    agreement: Agreement


def run(args: argparse.Namespace, job: Job) -> int:
    text, checkpoint = read_text(Path(args.text)), job.checkpoint
    if args.plot:
        check_output(Path(args.plot), [Path(args.text), *files_of(checkpoint.path)])
    _check_changes(job)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    model = open_model(checkpoint, args.backend, progress=True)
    check_head(model.config)
    windows = cut_windows(
        ids[: args.max_tokens], window_size(args, model), tokenizer.bos_id if tokenizer.add_bos else None
    )
    with TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        base = measure(save(reference, checkpoint.path.name, windows, model.config.vocab, score(model, windows)))
        del model
        costs = _costs(args, job, windows, reference)
    size = windows.shape[1]
    print(f"{checkpoint.path.name}, {args.text}: {windows.size} tokens in windows of {size}, {base.scored} scored")
    print(f"each kind alone in {job.format}; perplexity of the source {base.perplexity.value:.4f}")
    _print(costs, base.perplexity.value)
    if args.plot:
        rewrite(Path(args.plot), plot(costs, f"{checkpoint.path.name}: one kind at a time in {job.format}"))
        print(f"drawn in {args.plot}")
    return 0


def _costs(args: argparse.Namespace, job: Job, windows: np.ndarray, reference: Path) -> list[Cost]:
    """Measure the cost of quantizing each kind of matrix alone, the highest first, and at last of the whole recipe."""
    kinds: dict[str, list[Weight]] = defaultdict(list)
    for weight in job.weights.values():
        kinds[weight.kind].append(weight)
    with tqdm(total=len(kinds) + 1, desc="measuring", unit="kind", leave=False, disable=None) as bar:

        def cost(name: str, weights: Sequence[Weight], quantization: Job) -> Cost | None:
            made = _cost(args, quantization, name, weights, windows, reference)
            bar.update()
            return made

        each = [found for name, weights in kinds.items() if (found := cost(name, weights, _alone(job)))]
        whole = cost("the recipe", list(job.weights.values()), job)
    return sorted(each, key=lambda c: -c.agreement.kl.value) + ([whole] if whole else [])


def _check_changes(job: Job) -> None:
    """Refuse a job that quantizes no matrix, neither by itself nor by the recipe: UsageError."""
    weights, alone = list(job.weights.values()), _alone(job)
    if not _changed(alone, weights) and not _changed(job, weights):
        name, kept = job.checkpoint.path.name, choose(weights[0], alone.recipe, job.requantize, is_gguf=True)
        raise UsageError(
            f"no matrix of {name} would change, since {weights[0].kind} {kept.reason}; choose another format"
        )


def _alone(job: Job) -> Job:
    """Replace the recipe of a job by its one format, in which each kind is quantized alone."""
    return replace(job, recipe=lambda weight: job.format)


def _changed(job: Job, weights: Sequence[Weight]) -> list[tuple[Weight, Format]]:
    """List the weights that a job quantizes, and their formats."""
    chosen = ((weight, choose(weight, job.recipe, job.requantize, is_gguf=True).format) for weight in weights)
    return [(weight, format) for weight, format in chosen if format is not None]


def _cost(
    args: argparse.Namespace, job: Job, kind: str, weights: Sequence[Weight], windows: np.ndarray, reference: Path
) -> Cost | None:
    """Measure the cost of quantizing `weights`; None if no width among them suits the format."""
    tensors, values, before, after = dict(job.checkpoint.tensors), 0, 0, 0
    if not (changed := _changed(job, weights)):
        return None
    for weight, format in changed:
        tensor = weight.tensor
        quantized = encode(tensor, format)
        tensors[tensor.name] = dense(tensor.name, dequantize(quantized))
        values += int(np.prod(tensor.shape))
        before, after = before + tensor.nbytes, after + quantized.nbytes
    model: Model = open_model(replace(job.checkpoint, tensors=tensors), args.backend)
    result = measure(score(model, windows), open_saved(reference).blocks())
    assert result.agreement is not None
    bits = 8 * after / values
    return Cost(kind, len(changed), values, bits, before - after, result.perplexity.value, result.agreement)


def _print(costs: Sequence[Cost], base: float) -> None:
    width = max(len(cost.kind) for cost in costs)
    print(f"{'kind':{width}} {'matrices':>8} {'values, M':>10} {'bits':>6} {'saved, MiB':>11} {'KL, nats':>21}", end="")
    print(f" {'perplexity':>11} {'same top':>9}")
    for c in costs:
        kl = f"{c.agreement.kl.value:.6f} ± {c.agreement.kl.error:.6f}"
        print(f"{c.kind:{width}} {c.matrices:8} {c.values / 1e6:10.2f} {c.bits:6.3f} {c.saved / 2**20:11.1f}", end="")
        print(f" {kl:>21} {c.perplexity - base:+11.4f} {c.agreement.top1.value:9.2%}")


def plot(costs: Sequence[Cost], title: str) -> str:
    """Draw as SVG text a bar for the divergence of each kind, from 0, with its standard error."""
    most = max([cost.agreement.kl.value + _error(cost) for cost in costs] + [1e-12])
    height = 60 + ROW * len(costs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + BAR + 130}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20">{escape(title)}</text>',
        f'<text x="{LABEL}" y="{height - 8}">mean KL divergence from the source, nats</text>',
    ]
    for i, cost in enumerate(costs):
        y, value = 34 + ROW * i, cost.agreement.kl.value
        end, error = LABEL + BAR * value / most, BAR * _error(cost) / most
        parts.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(cost.kind)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{max(end - LABEL, 0):.1f}" height="{ROW - 6}" fill="#0072b2"/>')
        parts.append(f'<path d="M{end - error:.1f} {y + 8}H{end + error:.1f}" stroke="#333333"/>')
        parts.append(f'<text x="{end + error + 6:.1f}" y="{y + 12}">{value:.3g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _error(cost: Cost) -> float:
    return cost.agreement.kl.error if np.isfinite(cost.agreement.kl.error) else 0.0
