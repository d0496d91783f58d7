"""Run the kernels that mx.fast.metal_kernel would give to a Mac on this machine's CPU: see the package's docstring."""

import ctypes
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from simt import build, text

if build.MISSING:
    raise ImportError(build.MISSING)

from simt.build import BuildError
from simt.check import CheckError, check

__all__ = ["BuildError", "CheckError", "KernelError", "metal_kernel", "on_metal"]

MLX_METAL_KERNEL = mx.fast.metal_kernel
FLAGS = ["-std=c++17", "-O1", "-g1", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += ["-fno-threadsafe-statics", "-fno-gnu-unique", "-fvisibility=hidden", "-mf16c", "-fsingle-precision-constant"]
FLAGS += ["-fsanitize=thread,bounds-strict,shift-exponent,alignment,integer-divide-by-zero,return"]
FLAGS += ["-fno-sanitize-recover=all", "--param=tsan-instrument-func-entry-exit=0"]
SCHEDULES = {"forward": 0, "reverse": 1, "random": 2}
MOST_GROUP_MEMORY = 32 << 10
MOST_THREADS = 1024
MOST_BUFFERS = 31
SECONDS = 20.0  # of CPU for one run of a grid
SWIZZLE = re.compile(r"\.([xyzw]{2,4}|[rgba]{2,4})\b")
THREADGROUP_VARIABLE = re.compile(r"\bthreadgroup(?=\s+[^;*&(){}]*?\w\s*[\[;,=])")


class KernelError(AssertionError):
    """A fault of a kernel: something that it must not do on a GPU."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("item", ctypes.c_uint32),
        ("role", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("threads", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_uint32),
        ("returned_may_skip_barriers", ctypes.c_uint32),
        ("group_memory", ctypes.c_void_p),
        ("group_memory_bytes", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
    )


def cpp(launch: text.Launch) -> str:
    """The text of a kernel as C++ for metal.h, with an entry that takes its arguments from `simt_pointers`."""
    flat = text.flat(launch.text, lambda name, args: f"static void {name}(\n{args})")
    flat = THREADGROUP_VARIABLE.sub("THREADGROUP_VARIABLE", flat)
    swizzles = sorted(set(SWIZZLE.findall(flat)))
    members = ""
    for n in (2, 3, 4):
        fitting = [[("xyzw" if c in "xyzw" else "rgba").index(c) for c in s] for s in swizzles]
        named = [
            f"Swizzle<T, {n}, {', '.join(map(str, i))}> {s};"
            for s, i in zip(swizzles, fitting, strict=True)
            if max(i) < n
        ]
        members += f"#define SWIZZLES_{n} {' '.join(named)}\n"
    given, buffers = [], 0
    for argument in text.arguments(launch.text):
        if argument.mark:
            given.append(f"{'*' * (argument.mark == '&')}({argument.type}*)simt_pointers[{buffers}]")
            buffers += 1
        else:
            given.append(f"attribute_{argument.name}()")
    return f"""{members}#include "metal.h"
#line 1 "{launch.name}"
{flat}
#undef kernel
extern char __start_threadgroup[] __attribute__((weak, visibility("hidden")));
extern char __stop_threadgroup[] __attribute__((weak, visibility("hidden")));
#define EXPORT extern "C" __attribute__((visibility("default"), no_sanitize("undefined")))
EXPORT void* simt_pointers[64] = {{}};
EXPORT char* simt_threadgroup_start() {{ return __start_threadgroup; }}
EXPORT char* simt_threadgroup_stop() {{ return __stop_threadgroup; }}
EXPORT __attribute__((no_sanitize("thread"))) void simt_entry() {{ {launch.name}({", ".join(given)}); }}
"""


@functools.cache
def _library(code: str) -> ctypes.CDLL:
    build.engine()
    library = ctypes.CDLL(str(build.library(code, FLAGS)))
    for name in ("simt_threadgroup_start", "simt_threadgroup_stop"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


def _numpy(array: mx.array) -> np.ndarray:
    """The array's elements where MLX holds them, strides included; bfloat16 as its bits."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _numpy_type(dtype: mx.Dtype) -> np.dtype:
    return np.dtype(np.uint16) if dtype == mx.bfloat16 else np.asarray(mx.zeros((), dtype)).dtype


def _span(array: np.ndarray) -> tuple[np.ndarray, int]:
    """The memory from the lowest to the highest element of a strided array, and the bytes before its first element."""
    if not array.size:
        return np.empty(0, np.uint8), 0
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    total = before + sum(r for r in reach if r > 0) + array.itemsize
    address = array.__array_interface__["data"][0] - before
    return np.ctypeslib.as_array((ctypes.c_uint8 * total).from_address(address)).copy(), before


def run(
    launch: text.Launch,
    input_names: Sequence[str],
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[str, tuple[int, ...], mx.Dtype]],
    init_value: float | None,
    schedule: int,
) -> list[np.ndarray]:
    """The outputs of one launch under one schedule; raises KernelError."""
    grid, group = launch.grid, launch.threadgroup
    if min(grid + group) < 1:
        raise KernelError(f"{launch.name}: a grid of {grid} threads in groups of {group}")
    if np.prod(group) > MOST_THREADS:
        raise KernelError(f"{launch.name}: {np.prod(group)} threads in a group; Metal takes {MOST_THREADS} at most")
    library = _library(cpp(launch))
    start, stop = (getattr(library, f"simt_threadgroup_{end}")() or 0 for end in ("start", "stop"))
    if stop - start > MOST_GROUP_MEMORY:
        raise KernelError(f"{launch.name}: {stop - start} bytes of threadgroup memory; Metal has {MOST_GROUP_MEMORY}")

    memory: dict[str, tuple[np.ndarray, int, int, int]] = {}  # name: data, bytes before its start, item, role
    for name, array in zip(input_names, inputs, strict=True):
        values = _numpy(array)
        if launch.contiguous:
            values = np.ascontiguousarray(values)
        data, before = _span(values.reshape(array.shape))
        memory[name] = (data, before, values.itemsize, 0)
        shape, strides = values.shape, [stride // values.itemsize for stride in values.strides]
        memory[f"{name}_shape"] = (np.array(shape, np.int32), 0, 4, 0)
        memory[f"{name}_strides"] = (np.array(strides, np.int64), 0, 8, 0)
        memory[f"{name}_ndim"] = (np.array([array.ndim], np.int32), 0, 4, 0)
    results = []
    for name, shape, dtype in outputs:
        result = np.empty(shape, _numpy_type(dtype))
        if init_value is not None:
            result[...] = _numpy(mx.array(init_value).astype(dtype))
        results.append(result)
        memory[name] = (result, 0, result.itemsize, 1 if init_value is None else 2)

    names = [argument.name for argument in text.arguments(launch.text) if argument.mark]
    if len(names) > MOST_BUFFERS:
        raise KernelError(f"{launch.name}: {len(names)} buffers; Metal has {MOST_BUFFERS}")
    buffers = (_Buffer * len(names))()
    for buffer, name in zip(buffers, names, strict=True):
        data, before, item, role = memory[name]
        buffer.name, buffer.data, buffer.bytes = name.encode(), data.ctypes.data, data.nbytes
        buffer.first, buffer.item, buffer.role = before, item, role
    entry = ctypes.cast(library.simt_entry, ctypes.c_void_p).value
    sizes = [(ctypes.c_uint32 * 3)(*size) for size in (grid, group)]
    told = _Launch(entry, *sizes, schedule, 0, start or None, stop - start, SECONDS)
    pointers = (ctypes.c_void_p * 64).in_dll(library, "simt_pointers")
    error = build.engine().simt_run(ctypes.byref(told), buffers, len(names), pointers)
    if error:
        raise KernelError(f"{launch.name}: {build.located(error.decode(), library._name, launch.text)}")
    return results


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
) -> Callable[..., list[mx.array]]:
    """A form of mx.fast.metal_kernel whose calls check the kernel and run it here, under every schedule."""
    kernel: Any = MLX_METAL_KERNEL(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
    )

    def call(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
        **sizes: Any,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        launch = text.recorded(kernel, arrays, output_shapes=output_shapes, output_dtypes=output_dtypes, **sizes)
        check(launch.text)
        outputs = list(zip(output_names, (tuple(s) for s in output_shapes), output_dtypes, strict=True))
        results: dict[str, list[np.ndarray]] = {}
        for schedule, number in SCHEDULES.items():
            results[schedule] = run(launch, input_names, arrays, outputs, init_value, number)
            for (output, *_), ours, first in zip(outputs, results[schedule], results["forward"], strict=True):
                if not atomic_outputs and ours.tobytes() != first.tobytes():
                    raise KernelError(f"{launch.name}: {output} differs between the orders forward and {schedule}")
        made = [mx.array(r) for r in results["forward"]]
        return [m.view(d) if d == mx.bfloat16 else m for m, (_, _, d) in zip(made, outputs, strict=True)]

    return call


@contextmanager
def on_metal() -> Iterator[None]:
    """Within this context mx.fast.metal_kernel is `metal_kernel`, and launchers, ours and others, find a Mac."""
    with (
        mock.patch.object(mx.fast, "metal_kernel", metal_kernel),
        mock.patch.object(mx.metal, "is_available", return_value=True),
        mock.patch.object(mx, "default_device", return_value=mx.Device(mx.gpu)),
    ):
        yield
