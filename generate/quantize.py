"""`python -m generate quantize MODEL OUT`: a model in fewer bits, as an MLX folder or a GGUF file."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from common.adapted import merged
from common.checkpoint import open_checkpoint
from common.errors import BimetalError, UsageError
from common.files import naming
from common.hub import resolve_model
from common.models import architecture
from common.models.mtp import refuse_block
from common.outputs import Output, begin, check_place, parts_of
from common.quantize import Format, gguf_format, mlx_format
from common.recipe import (
    RECIPES,
    check_rules,
    find_weights,
    parse_rule,
    with_rules,
)
from common.weights import account
from generate.loading import with_adapters
from generate.quantize_job import Job

ONLY_GGUF, ONLY_MLX = ("type",), ("bits", "group_size", "mode", "shard_size")


def run(args: argparse.Namespace) -> int:
    is_gguf = (args.out or "").endswith(".gguf") or (args.out is None and args.type is not None)
    format = _format(args, is_gguf)
    rules = [parse_rule(text, is_gguf) for text in args.layers or ()]
    path = resolve_model(args.model)
    out = None if args.out is None else Path(args.out)
    if out is not None:
        check_place(out, path)
    checkpoint = with_adapters(open_checkpoint(path), args.adapter or (), True)
    refuse_block(checkpoint)
    family, definition = architecture(checkpoint)
    layout = definition.layout(definition.read_config(checkpoint), checkpoint)
    account(checkpoint, layout)
    checkpoint = merged(checkpoint, layout)
    weights = find_weights(checkpoint, layout)
    check_rules(rules, weights)
    recipe = with_rules(RECIPES[args.recipe](format), rules)
    job = Job(checkpoint, family, definition, layout, weights, format, recipe, is_gguf, args.requantize)
    if out is None:
        from generate import sensitivity

        return sensitivity.run(args, job)
    with naming(out):
        (_write_gguf if is_gguf else _write_folder)(job, out, args.shard_size or 5 * 10**9)
    return 0


def _format(args: argparse.Namespace, is_gguf: bool) -> Format:
    """Return the format that most matrices take; refuses flags of the other kind of file."""
    where = "a .gguf file" if is_gguf else "an MLX folder"
    for name in ONLY_MLX if is_gguf else ONLY_GGUF:
        if getattr(args, name) is not None:
            other = "an MLX folder" if is_gguf else "a .gguf file"
            raise UsageError(f"--{name.replace('_', '-')} goes with {other}, and OUT is {where}")
    if not is_gguf:
        return mlx_format(args.mode or "affine", args.bits, args.group_size)
    if find_spec("gguf") is None:
        raise BimetalError("GGUF files are written by the gguf package: pip install 'bimetal[gguf]'")
    return gguf_format(args.type or "Q8_0")


def _write_folder(job: Job, out: Path, shard_bytes: int) -> None:
    from common.gguf_to_folder import as_folder, write_files
    from common.mlx_folder import copy_files, finish_folder, folder_outputs, write_config, write_shards

    checkpoint, is_gguf = job.checkpoint, job.checkpoint.format == "gguf"
    if is_gguf:
        made = as_folder(checkpoint, job.family, job.definition, job.layout, job.weights, job.choices())
        config, outputs = made.config, made.outputs
    else:
        config, outputs = checkpoint.config, folder_outputs(checkpoint, job.layout, job.weights, job.choices())
    part = begin(out, checkpoint, outputs, {"shard": shard_bytes, "format": str(job.format)})
    with _bar(outputs) as bar:
        write_shards(part, outputs, shard_bytes, bar.update)
    if is_gguf:
        config |= write_files(part, checkpoint)
    else:
        copy_files(part, checkpoint.path)
    write_config(part, config, outputs, job.format)
    finish_folder(part, out)
    _report(job, out, outputs)


def _write_gguf(job: Job, out: Path, _: int) -> None:
    from common.gguf_file import converted, copied_keys, copied_outputs, finish_gguf, write_gguf

    if job.checkpoint.format == "gguf":
        keys = copied_keys(job.checkpoint.path, job.format)
        outputs = copied_outputs(job.checkpoint, job.weights, job.choices())
    else:
        keys, outputs = converted(job.checkpoint, job.definition, job.layout, job.weights, job.choices())
    part = begin(out, job.checkpoint, outputs, {"format": str(job.format)})
    with _bar(outputs) as bar:
        write_gguf(part, keys, outputs, job.format, bar.update)
    finish_gguf(part, out)
    _report(job, out, outputs)


def _bar(outputs: Sequence[Output]) -> tqdm:
    total = sum(sum(parts_of(output)) for output in outputs)
    return tqdm(total=total, desc="quantizing", unit="B", unit_scale=True, leave=False, disable=None)


def _report(job: Job, out: Path, outputs: Sequence[Output]) -> None:
    """Print what was written, by kind of matrix and format."""
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for output in outputs:
        stored = str(output.format) if output.format else output.type
        row = rows[output.kind or "the rest", stored, output.reason]
        values = 1
        for n in output.shape:
            values *= n
        for i, more in enumerate((1, values, sum(parts_of(output)))):
            row[i] += more
    width = max(len(kind) for kind, _, _ in rows)
    for (kind, stored, reason), (count, values, nbytes) in rows.items():
        note = f"  ({reason})" if reason else ""
        print(f"{kind:{width}} {count:5} {nbytes / 2**20:10.1f} MiB {8 * nbytes / values:7.3f} bits  {stored}{note}")
    total = sum(nbytes for _, _, nbytes in rows.values())
    source = sum(tensor.nbytes for tensor in job.checkpoint.tensors.values())
    print(f"{out}: {total / 2**20:.1f} MiB, of a source of {source / 2**20:.1f} MiB")
    fragile = [8 * nbytes / values for (kind, _, _), (_, values, nbytes) in rows.items() if kind in ("embed", "head")]
    if job.family == "wedlm":
        few = min(fragile, default=8) < 8
        worth = "are worth more bits, such as the 8 of --recipe careful" if few else "keep at least 8 bits"
        print(
            f"The embedding and the head {worth}: every mask position reads one row of the embedding, and the entropy "
            "of the head's logits decides which positions are filled."
        )
