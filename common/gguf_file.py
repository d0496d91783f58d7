"""Writing a GGUF file: the tensors of a checkpoint under GGUF's names, and a file that grows tensor by tensor.

The header is made by the gguf package. Which tensors there are, and in which order their rows lie, is what the model's
own table reads: the same table, once for the source and once for the file to write.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from common.checkpoint import UNFINISHED, Checkpoint
from common.errors import BimetalError
from common.gguf_keys import QUANTIZATION_VERSION, Key, Kind, gguf_keys, stand_in
from common.outputs import Output, check_space, encoded_chunks, output_of, parts_of
from common.quantize import FLOAT_TYPES, Format, float_type
from common.quants import BLOCKS
from common.recipe import Choice, Weight, choice_of
from common.tensors import Tensor
from common.weights import Fix, Layout, Matrix, Stored, canonical, dense

ALIGNMENT = 32
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}  # llama.cpp
DATA = "model.gguf"
Advance = Callable[[int], object]


# -- from a GGUF file --------------------------------------------------------------------------------------------------


def copied_keys(path: Path, default: Format) -> list[Key]:
    """Return the metadata of a GGUF file (the first of a split one), for a file of other types."""
    from gguf import GGUFReader, GGUFValueType

    keys = []
    for name, field in GGUFReader(path).fields.items():
        if name.startswith(("GGUF.", "split.")) or name in _own_keys(default) or name == "general.alignment":
            continue
        if field.types[0] == GGUFValueType.ARRAY and GGUFValueType.ARRAY in field.types[1:]:
            raise BimetalError(f"{path}: the metadata key {name!r} is an array of arrays, which cannot be copied")
        keys.append(Key(name, field.contents(), int(field.types[-1])))
    return keys


def copied_outputs(checkpoint: Checkpoint, weights: dict[str, Weight], choices: dict[str, Choice]) -> list[Output]:
    """List every tensor of a GGUF checkpoint, in the order of the file."""
    outputs = []
    for name, tensor in checkpoint.tensors.items():
        if name in weights:
            outputs.append(output_of(name, tensor, weights[name].kind, choices[name].format, choices[name].reason))
        else:
            outputs.append(output_of(name, tensor))
    return outputs


# -- from a Hugging Face folder ----------------------------------------------------------------------------------------


def converted(
    checkpoint: Checkpoint,
    definition: ModuleType,
    layout: Layout,
    weights: dict[str, Weight],
    choices: dict[str, Choice],
) -> tuple[list[Key], list[Output]]:
    """Convert metadata and tensors of a Hugging Face checkpoint; parts that the model does not run are left out."""
    keys, divisors = gguf_keys(checkpoint, definition)
    file = stand_in(checkpoint, keys, divisors, layout.top.get("head") is None)
    written = definition.layout(definition.read_config(file), file)
    outputs = [output_of(name, dense(name, each), format=Format("F32")) for name, each in divisors.items()]
    for ours, theirs in zip((layout.top, *layout.layers), (written.top, *written.layers), strict=True):
        for name, entry in ours.items():
            other = theirs[name]
            if entry is None or other is None:
                continue
            whole = len(other.parts) // len(entry.parts)  # 2 where one tensor holds gate and up
            for i, target in enumerate(other.parts):
                source = entry.parts[i // whole]
                load = partial(_load, checkpoint, source, target, i % whole, whole)
                shape, type_ = target.shape, float_type(checkpoint.tensors[source.names[0]])
                if not isinstance(entry, Matrix):
                    outputs.append(Output(target.names[0], "", shape, type_, Format("F32"), load))
                    continue
                weight, stored = weights[source.names[0]], checkpoint.tensors[source.names[0]].type
                choice, experts = choice_of(weight, choices), _experts(checkpoint, source, target, i % whole, whole)
                if choice.format is not None and shape[-1] % choice.format.unit:  # a part of a tensor, transposed
                    choice = Choice(None, f"rows of {shape[-1]} are no multiple of {choice.format.unit}")
                if choice.format is None and stored in BLOCKS and stored not in FLOAT_TYPES:  # GPTQ, AWQ, ...
                    outputs.append(
                        Output(target.names[0], weight.kind, shape, stored, None, load, choice.reason, experts)
                    )
                    continue
                plain = Format("F32") if weight.kind == "router" else Format(type_ if type_ in FLOAT_TYPES else "F32")
                format = choice.format or plain
                outputs.append(Output(target.names[0], weight.kind, shape, type_, format, load, choice.reason, experts))
    return keys, outputs


def _experts(checkpoint: Checkpoint, source: Stored, target: Stored, part: int, parts: int) -> tuple[Tensor, ...]:
    """List the experts of a layer one by one, to hold few in memory; () if their rows are reordered."""
    tensors = tuple(checkpoint.tensors[name] for name in source.names)
    if source.fix or target.fix or len(source.shape) < 3:
        return ()
    if len(tensors) > 1:
        return tensors
    whole = tensors[0]
    if parts == 1 or whole.type not in FLOAT_TYPES:
        return ()
    rows = whole.shape[1] // parts
    shape, own = (rows, whole.shape[2]), slice(part * rows, (part + 1) * rows)
    return tuple(Tensor(whole.name, whole.type, shape, data[own]) for data in whole.data)


def _load(checkpoint: Checkpoint, source: Stored, target: Stored, part: int, parts: int) -> Tensor:
    """Load the weight in the order of rows of a GGUF file: canonical, then the inverse of the loader's fix."""
    tensor = canonical(checkpoint, source, unseen=True)
    for name in source.names if source.fix or len(source.names) > 1 else ():
        checkpoint.release(checkpoint.tensors[name])
    if parts > 1:
        rows = tensor.shape[1] // parts
        data = tensor.data[:, part * rows : (part + 1) * rows]
        tensor = replace(tensor, shape=(tensor.shape[0], rows, tensor.shape[2]), data=data)
    return tensor if target.fix is None else tensor.take_rows(_inverse(target.fix, tensor.shape[0]))


def _inverse(fix: Fix, count: int) -> np.ndarray:
    """Invert `fix`, which reorders rows: the order of `count` rows that it sorts."""
    numbers = np.arange(count, dtype="<i4")
    order = fix(Tensor("rows", "I32", (count, 1), numbers.view(np.uint8).reshape(count, 4))).data.view("<i4").ravel()
    return np.argsort(order)


# -- the file ----------------------------------------------------------------------------------------------------------


def write_gguf(partial: Path, keys: list[Key], outputs: Sequence[Output], default: Format, advance: Advance) -> None:
    """Write the file into the folder `partial`; tensors that it already has completely are kept.

    advance  is called with the number of bytes written, or found
    """
    header = _header(partial, [*keys, *(Key(n, v, Kind.UINT32.value) for n, v in _own_keys(default).items())], outputs)
    sizes = [sum(parts_of(output)) for output in outputs]
    check_space(partial, len(header) + sum(_padded(size) for size in sizes))
    path = partial / DATA
    done = _finished(path, header, sizes)
    with path.open("r+b" if done is not None else "wb") as file:
        if done is None:
            file.write(header)
            done = 0
        place = len(header) + sum(_padded(size) for size in sizes[:done])
        file.truncate(place)
        file.seek(place)
        advance(sum(sizes[:done]))
        for output, size in zip(outputs[done:], sizes[done:], strict=True):
            for chunk in encoded_chunks(output):
                file.write(chunk.data.data)
                advance(chunk.data.nbytes)
            file.write(bytes(_padded(size) - size))
        file.flush()
        os.fsync(file.fileno())
    if path.stat().st_size != len(header) + sum(_padded(size) for size in sizes):
        raise BimetalError(f"{path} has {path.stat().st_size} bytes, which is not what its tensors take")


def finish_gguf(partial: Path, out: Path) -> None:
    """Give the finished file its name, and remove its folder."""
    (partial / DATA).rename(out)
    (partial / UNFINISHED).unlink()
    partial.rmdir()


def _own_keys(default: Format) -> dict[str, int]:
    return {
        "general.file_type": FILE_TYPES[default.type],
        "general.quantization_version": QUANTIZATION_VERSION,
    }


def _header(partial: Path, keys: list[Key], outputs: Sequence[Output]) -> bytes:
    """Return everything in front of the tensors' data, padded."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    architecture = next(key.value for key in keys if key.name == "general.architecture")
    writer = GGUFWriter(None, architecture)
    for key in keys:
        if key.name == "general.architecture" or key.value == []:  # the writer has put the first; it refuses the other
            continue
        if isinstance(key.value, list):
            writer.add_key_value(key.name, key.value, GGUFValueType.ARRAY, GGUFValueType(key.kind))
        else:
            writer.add_key_value(key.name, key.value, GGUFValueType(key.kind))
    for output in outputs:
        type_ = GGMLQuantizationType[output.format.type if output.format else output.type]
        size = sum(parts_of(output))
        writer.add_tensor_info(output.name, output.shape, np.dtype(np.float32), size, type_)
    path = partial / "header"
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = path.read_bytes()
    path.unlink()
    return header + bytes(_padded(len(header)) - len(header))


def _finished(path: Path, header: bytes, sizes: list[int]) -> int | None:
    """Count the complete tensors in a file of an earlier run; None if even its header is incomplete."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            return None
    room, done = path.stat().st_size - len(header), 0
    while done < len(sizes) and _padded(sizes[done]) <= room:
        room -= _padded(sizes[done])
        done += 1
    return done


def _padded(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT
