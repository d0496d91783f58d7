"""Write a model as MLX stores it: a folder of safetensors shards that mlx-lm and our loader read.

A quantized matrix is three tensors, `X.weight` (uint32 words), `X.scales` and, for affine groups, `X.biases`;
config.json has the settings under "quantization", with an entry for every module that differs from the rest.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint import INDEX, UNFINISHED, WEDLM, Checkpoint
from common.errors import BimetalError
from common.files import rewrite
from common.outputs import Output, check_space, encoded_chunks, output_of, parts_of
from common.pooling import POOLING_FOLDER
from common.quantize import FLOAT_TYPES, Format, float_type, scale_type
from common.quants import dequantize
from common.recipe import Choice, Weight, choice_of
from common.safetensors import MODES
from common.tensors import Converted, Tensor
from common.wedlm_calibration import NAME as CALIBRATION
from common.weights import Layout, Stored, canonical, dense, exchanged

SPLIT = {"k_up": "embed_q", "v_up": "unembed_out"}  # what mlx-lm makes of kv_b_proj, but DeepSeek-V2's, by our names
STACKS = {"input_linear.weight": "gate_up_proj", "output_linear.weight": "down_proj"}  # of Granite's experts
EXPERTS = {  # modules of what gpt-oss's safetensors join or transpose, by our names
    "experts_gate_up": ("gate_proj.weight", "up_proj.weight"),
    "experts_down": ("down_proj.weight",),
    **{f"{part}_bias": (f"{part}_proj.bias",) for part in ("gate", "up", "down")},
}
KEPT_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # tokenizers, templates, settings, code
Advance = Callable[[int], object]
Entry = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


def folder_outputs(
    checkpoint: Checkpoint, layout: Layout, weights: dict[str, Weight], choices: dict[str, Choice]
) -> list[Output]:
    """List every tensor of a safetensors checkpoint as the folder will store it, in the order of the files."""
    for name in weights:
        converted = checkpoint.tensors[name]
        if isinstance(converted, Converted) and converted.type not in FLOAT_TYPES and choices[name].format is None:
            raise BimetalError(
                f"tensor {name!r} is read as {converted.type}, which an MLX folder cannot store; give --requantize, or "
                "write a .gguf file"
            )
    outputs, apart = [], _apart(layout)
    split = {} if checkpoint.config.get("model_type") == "deepseek_v2" else _split(layout)
    for name, tensor in checkpoint.tensors.items():
        new_name = _mlx_name(checkpoint, name)
        if name in apart:
            for module, stored in apart[name]:
                outputs.append(_expert_part(checkpoint, module, stored, weights.get(name), choices.get(name)))
        elif name not in weights:
            if (kept := _as_mlx_lm(checkpoint, name, tensor)) is not None:
                outputs.append(output_of(new_name, kept))
        elif len(weights[name].stored.names) > 1:
            if name == weights[name].stored.names[0]:
                outputs.append(_stacked(checkpoint, new_name, weights[name], choice_of(weights[name], choices)))
        elif name in split and (format := choices[name].format) is not None:
            outputs += [_part(checkpoint, new_name, weights[name], format, *part) for part in split[name]]
        elif weights[name].stored.fix is exchanged:
            outputs += _exchanged(checkpoint, new_name, weights[name], choices[name])
        else:
            weight, choice = weights[name], choices[name]
            for module, part in _as_modules(new_name, tensor, choice.format):
                outputs.append(output_of(module, part, weight.kind, choice.format, choice.reason))
    return outputs


def _apart(layout: Layout) -> dict[str, list[tuple[str, Stored]]]:
    """Return what gpt-oss's safetensors hold of experts and mlx-lm divides: the name and the place of each part."""
    found: dict[str, list[tuple[str, Stored]]] = {}
    for table in layout.layers if "gate_bias" in layout.layers[0] else ():
        for entry, modules in EXPERTS.items():
            for stored, module in zip(table[entry].parts, modules, strict=True):  # type: ignore[union-attr]
                (name,) = stored.names
                if not name.endswith(module):
                    found.setdefault(name, []).append((f"{name.rpartition('.')[0]}.{module}", stored))
    return found


def _expert_part(
    checkpoint: Checkpoint, module: str, stored: Stored, weight: Weight | None, choice: Choice | None
) -> Output:
    """Take one module's weight, or its biases if `weight` is None, out of a tensor of all experts."""
    load = partial(canonical, checkpoint, stored, unseen=True)
    if weight is None or choice is None:
        return output_of(module, load())
    tensor = weight.tensor
    if choice.format is None and tensor.scales is not None:
        return Output(module, weight.kind, stored.shape, tensor.type, None, load, choice.reason)
    type_ = float_type(tensor)
    format = choice.format or Format(type_ if type_ in FLOAT_TYPES else "F32")
    return Output(module, weight.kind, stored.shape, type_, format, load, choice.reason)


def _split(layout: Layout) -> dict[str, list[tuple[str, Stored]]]:
    """Return the tensors that are two modules of mlx-lm's, with the module and the part of each."""
    found: dict[str, list[tuple[str, Stored]]] = {}
    for table in layout.layers:
        for entry, module in SPLIT.items():
            stored = table[entry].parts[0] if table.get(entry) is not None else None  # type: ignore[union-attr]
            if stored is not None and stored.part_of is not None:
                found.setdefault(stored.names[0], []).append((module, stored))
    return found


def _part(checkpoint: Checkpoint, name: str, weight: Weight, format: Format, module: str, stored: Stored) -> Output:
    """Cut one module out of a tensor that is split; in float if its rows are no multiple of the group."""
    type_, width = float_type(weight.tensor), stored.shape[-1]
    reason = f"rows of {width} are no multiple of {format.unit}" if width % format.unit else ""
    plain = Format(type_ if type_ in FLOAT_TYPES else "F32")
    new_name = f"{name.rpartition('.kv_b_proj')[0]}.{module}.weight"
    load = partial(canonical, checkpoint, stored, unseen=True)
    return Output(new_name, weight.kind, stored.shape, type_, plain if reason else format, load, reason)


def _stacked(checkpoint: Checkpoint, name: str, weight: Weight, choice: Choice) -> Output:
    """Stack the experts of a layer, one tensor each, to the one module of mlx-lm."""
    tensors = tuple(checkpoint.tensors[each] for each in weight.stored.names)
    first, *others = tensors
    for other in others:
        if (other.type, other.shape) != (first.type, first.shape):
            one, another = (f"{t.name} is {t.type} {t.shape}" for t in (other, first))
            raise BimetalError(f"{one} but {another}; the experts of a layer must be stored alike")
    module = name.replace(".experts.0.", ".switch_mlp.")
    type_ = float_type(first) if choice.format else first.type
    shape = (len(tensors), *first.shape)
    return Output(module, weight.kind, shape, type_, choice.format, lambda: first, choice.reason, tensors)


def _exchanged(checkpoint: Checkpoint, name: str, weight: Weight, choice: Choice) -> list[Output]:
    """Divide a stack of experts whose rows and columns are exchanged into the modules of mlx-lm."""
    stem, _, leaf = name.rpartition(".experts.")
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
    count, rows, columns = weight.stored.shape
    shape, type_ = (count, rows // len(parts), columns), float_type(weight.tensor)

    def load(at: int) -> Tensor:
        own = slice(at * shape[1], (at + 1) * shape[1])
        tensor = canonical(checkpoint, weight.stored, unseen=True)
        return Tensor(tensor.name, tensor.type, shape, tensor.data[:, own])

    format = choice.format or Format(type_ if type_ in FLOAT_TYPES else "F32")
    return [
        Output(f"{stem}.switch_mlp.{p}.weight", weight.kind, shape, type_, format, partial(load, at), choice.reason)
        for at, p in enumerate(parts)
    ]


def _mlx_name(checkpoint: Checkpoint, name: str) -> str:
    """Return mlx-lm's name of a tensor: the text model of Qwen3.5, and of Gemma 3 beside a vision tower, is
    `language_model` there.
    """
    family = str(checkpoint.config.get("model_type"))
    if family == "gemma3" and name.startswith(("model.vision_tower.", "model.multi_modal_projector.")):
        return name.removeprefix("model.")
    if family.startswith("qwen3_vl") and name.startswith(("model.visual.", "visual.")):
        return "vision_tower." + name.removeprefix("model.").removeprefix("visual.")
    wraps = family.startswith(("qwen3_5", "qwen3_vl")) or family == "gemma3"
    if not wraps or name.startswith(("language_model.", "vision_tower.", "multi_modal_projector.")):
        return name
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    if name.startswith(("model.visual.", "visual.", "vision_tower.")):
        return name
    return "language_model." + name


def _as_mlx_lm(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Tensor | None:
    """Return a tensor that is no matrix as mlx-lm stores it: of Qwen3-Next norms around 1, taps last; None: left out.

    mlx-lm does the same to other models when it reads them, but to this one only beside experts that are not stacked.
    """
    if checkpoint.config.get("model_type") != "qwen3_next" or tensor.shape[-1:] == (1,):
        return tensor
    if name.startswith("mtp."):
        return None
    conv = next(t for n, t in checkpoint.tensors.items() if n.endswith("conv1d.weight"))
    if conv.shape[-1] == 1:  # of mlx-lm
        return tensor
    if name.endswith("conv1d.weight"):
        return tensor.reshape((tensor.shape[0], tensor.shape[-1], 1))
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return dense(name, dequantize(tensor) + 1)
    return tensor


def _as_modules(name: str, tensor: Tensor, format: Format | None) -> list[tuple[str, Tensor]]:
    """Divide a fused stack of experts (`experts.gate_up_proj`, Granite's `input_linear`) into the modules of mlx-lm."""
    stem, _, leaf = name.rpartition(".experts.")
    if name.endswith(tuple(STACKS)):
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        leaf = STACKS[f"{leaf}.weight"]
    elif format is None or name.endswith(".weight") or not stem or len(tensor.shape) != 3:
        return [(name, tensor)]
    if leaf != "gate_up_proj":
        return [(f"{stem}.switch_mlp.{leaf}.weight", tensor)]
    half = tensor.shape[1] // 2
    shape = (tensor.shape[0], half, tensor.shape[2])
    halves = (tensor.data[:, :half], tensor.data[:, half:])
    return [
        (f"{stem}.switch_mlp.{part}_proj.weight", Tensor(tensor.name, tensor.type, shape, data))
        for part, data in zip(("gate", "up"), halves, strict=True)
    ]


def write_shards(partial: Path, outputs: Sequence[Output], shard_bytes: int, advance: Advance) -> None:
    """Write the weights into `partial`, which keeps its marker; complete shards of an earlier run are kept.

    advance  is called with the number of bytes written, or found
    """
    shards = _shards(outputs, shard_bytes)
    total = sum(sum(parts_of(output)) for output in outputs)
    check_space(partial, total)
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        if (partial / name).exists():
            advance(sum(sum(parts_of(output)) for output in shard))
        else:
            _write_shard(partial / name, shard, advance)
    weight_map = {
        entry[0]: name for name, shard in zip(names, shards, strict=True) for o in shard for entry in _entries(o)
    }
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        rewrite(partial / INDEX, json.dumps(index, indent=1))


def copy_files(partial: Path, source: Path) -> None:
    """Copy what a safetensors folder holds beside its weights: tokenizer, templates, settings, code."""
    for file in sorted(source.iterdir()):
        own = file.name in ("config.json", CALIBRATION) or file.name.endswith(".index.json")
        if file.suffix in KEPT_FILES and file.is_file() and not own:
            shutil.copyfile(file, partial / file.name)
    for folder in ("additional_chat_templates", POOLING_FOLDER):
        if (source / folder).is_dir():
            shutil.copytree(source / folder, partial / folder, dirs_exist_ok=True)


def write_config(partial: Path, config: dict[str, Any], outputs: Sequence[Output], default: Format) -> None:
    """Write config.json: the source's, and how each matrix is stored.

    mlx-lm knows WeDLM's network as Qwen3, without norms of heads as Qwen2. `open_checkpoint` tells them apart by the
    class.
    """
    if config["model_type"] == "wedlm":
        network = "qwen3" if config.get("qk_norm") in (None, True) else "qwen2"
        config = config | {"model_type": network, "architectures": [WEDLM]}
    rewrite(partial / "config.json", json.dumps(_with_quantization(config, outputs, default), indent=1))


def finish_folder(partial: Path, out: Path) -> None:
    """Give the finished folder its name."""
    (partial / UNFINISHED).unlink()
    partial.rename(out)


def _shards(outputs: Sequence[Output], max_bytes: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        nbytes = sum(parts_of(output))
        if shards[-1] and size + nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _entries(output: Output) -> list[Entry]:
    """Return the tensors of one output as a header lists them."""
    sizes = parts_of(output)
    if output.format is not None and output.format.type in FLOAT_TYPES:
        return [(output.name, output.format.type, output.shape, sizes[0])]
    if output.format is None:
        tensor = output.load()
        if tensor.scales is None:
            return [(output.name, tensor.type, output.shape, sizes[0])]
        format, scales = Format(tensor.type, tensor.bits, tensor.group_size), tensor.scales.type
    else:
        format = output.format
        scales = scale_type(output.type) if format.type == "affine" else "U8"
    module, lead, width = output.name.removesuffix(".weight"), output.shape[:-1], output.shape[-1]
    groups = (*lead, width // format.group_size)
    entries = [
        (f"{module}.weight", "U32", (*lead, width * format.bits // 32), sizes[0]),
        (f"{module}.scales", scales, groups, sizes[1]),
    ]
    return [*entries, (f"{module}.biases", scales, groups, sizes[2])] if sizes[2] else entries


def _write_shard(path: Path, outputs: Sequence[Output], advance: Advance) -> None:
    """Write one safetensors file under another name, and rename it once it is on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    starts: list[list[int]] = []
    for output in outputs:
        starts.append([])
        for name, dtype, shape, nbytes in _entries(output):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + nbytes)}
            starts[-1].append(end)
            end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for output, places in zip(outputs, starts, strict=True):
            places = [8 + len(text) + at for at in places]
            for chunk in encoded_chunks(output):
                for i, data in enumerate(data for data in chunk if data is not None):
                    file.seek(places[i])
                    places[i] += file.write(data.data)
                    advance(data.nbytes)
        file.flush()
        os.fsync(file.fileno())
    if partial.stat().st_size != 8 + len(text) + end:
        raise BimetalError(f"{partial} has {partial.stat().st_size} bytes instead of {8 + len(text) + end}")
    partial.rename(path)


def _with_quantization(config: dict[str, Any], outputs: Sequence[Output], default: Format) -> dict[str, Any]:
    """Return `config` with the table that mlx-lm reads: an entry says how a module differs, false that it is dense."""
    table: dict[str, Any] = {"group_size": default.group_size, "bits": default.bits, "mode": default.type}
    for output in outputs:
        if not output.kind:
            continue
        format, module = output.format, output.name.removesuffix(".weight")
        if format is None and output.type in MODES:
            tensor = output.load()
            format = Format(tensor.type, tensor.bits, tensor.group_size)
        if format is None or format.type in FLOAT_TYPES:
            table[module] = False
        elif format != default:
            table[module] = {"group_size": format.group_size, "bits": format.bits, "mode": format.type}
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    return rest | {"quantization": table, "quantization_config": table}
