"""Compile kernels from CUDA C++ and launch them by their prototypes; streams; captured graphs."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy

from common.errors import BimetalError
from cuda_backend import cubin
from cuda_backend.background_copies import BackgroundCopies
from cuda_backend.prototypes import Arguments, prototypes, type_of
from cuda_backend.sources import ARCHITECTURES, OPTIONS, source
from cuda_backend.staged import StagedCopies


class Stream:
    """A CUDA stream, with the state that its next launch depends on.

    overlaps     launches may begin before the previous kernel has ended; set while a graph is captured
    joined       the stream has just waited for another stream: the next launch must not overlap
    is_captured  launches go to a graph
    launches  number of kernels launched, including those of replayed graphs
    copies    background copies of its results to the host
    staged    copies of large arrays from the host
    """

    def __init__(self) -> None:
        self.cuda = cupy.cuda.Stream(non_blocking=True)
        self.ptr = int(self.cuda.ptr)
        self.overlaps = self.joined = self.is_captured = False
        self.launches = 0
        self.copies, self.staged = BackgroundCopies(self.cuda), StagedCopies(self.cuda)

    def record(self, event: cupy.cuda.Event) -> None:
        event.record(self.cuda)

    def wait(self, event: cupy.cuda.Event) -> None:
        """Let later work on this stream wait for `event`, recorded on another stream."""
        self.cuda.wait_event(event)
        self.joined = True

    def synchronize(self) -> None:
        self.cuda.synchronize()


class Kernel:
    """A compiled function, whose launch converts Python numbers to the types of the parameters.

    In a captured graph, on compute capability 9.0 and newer, the kernel may begin before the preceding one has ended.
    Each of our kernels therefore waits (prelude.cuh `depend`) before it accesses memory that a step writes.
    """

    def __init__(self, raw: Any, parameters: Sequence[str]):
        self.raw, self.parameters = raw, tuple(parameters)
        self.function: int = raw.kernel.ptr
        self.arguments = Arguments([type_of(parameter) for parameter in parameters])

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        *,
        stream: Stream,
    ) -> None:
        try:
            extra = self.arguments.pack(args)
        except TypeError as error:
            raise TypeError(f"kernel {self.raw.name}({', '.join(self.parameters)}) was given {error}") from error
        stream.launches += 1
        overlap, stream.joined = stream.overlaps and not stream.joined, False
        dims = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        if not overlap:
            address = ctypes.addressof(extra)
            cupy.cuda.driver.launchKernel(self.function, *dims, shared_mem, stream.ptr, 0, address)
            return
        attribute = _Attribute(id=6)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value[0] = 1
        config = _Config(*dims, shared_mem, stream.ptr, ctypes.pointer(attribute), 1)
        status = _driver().cuLaunchKernelEx(
            ctypes.byref(config), ctypes.c_void_p(self.function), ctypes.c_void_p(), ctypes.byref(extra)
        )
        if status:
            raise RuntimeError(f"cuLaunchKernelEx returned {status} for {self.raw.name}")


class Graph:
    """Launches on a stream, and on others that wait for it, captured until `end` and replayed later."""

    def __init__(self, streams: Sequence[Stream], overlap: bool):
        self.streams = streams
        self.before = [stream.launches for stream in streams]
        streams[0].cuda.begin_capture()
        for stream in streams:
            stream.overlaps, stream.joined, stream.is_captured = overlap, False, True

    def end(self) -> None:
        self.kernels = 0
        for stream, before in zip(self.streams, self.before, strict=True):
            stream.overlaps = stream.is_captured = False
            self.kernels += stream.launches - before
            stream.launches = before  # no captured launch has run yet
        self.graph = self.streams[0].cuda.end_capture()

    def play(self) -> None:
        self.streams[0].launches += self.kernels
        self.graph.launch(self.streams[0].cuda)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def kernel(
    stem: str, name: str, defines: tuple[str, ...] = (), shared: int = 0, second: tuple[str, ...] = ()
) -> Kernel:
    """Return the function `name` of kernels/<stem>.cu, compiled on first use and kept in CuPy's cache on disk.

    defines  preprocessor definitions, as "COLS=8"
    shared   largest dynamic shared memory of a launch, bytes
    second   preprocessor definitions of a second matrix: sources.py `source`
    """
    return _kernel(cupy.cuda.runtime.getDevice(), stem, name, defines, shared, second)


@cache
def _kernel(
    device: int, stem: str, name: str, defines: tuple[str, ...], shared: int, second: tuple[str, ...]
) -> Kernel:
    """Return the function on the current device, `device`: each device has its own, with its own shared memory."""
    try:
        function = _module(device, stem, defines, second).get_function(name)
        _ = function.kernel  # compiles it
    except cupy.cuda.compiler.CompileException as error:
        raise BimetalError(f"NVRTC cannot compile kernels/{stem}.cu: {str(error).splitlines()[0]}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise (no_compiler(error) or error) from error
    if shared > 46 * 1024:  # above 48 KB, with the kernel's own declarations, shared memory must be requested
        function.max_dynamic_shared_size_bytes = shared
    return Kernel(function, _prototypes(stem)[name])


def kernels_built() -> int:
    """Count the kernels that this process has compiled, or loaded from CuPy's cache."""
    return _kernel.cache_info().misses


@cache
def _prototypes(stem: str) -> dict[str, tuple[str, ...]]:
    return prototypes(source(stem))


def check_compiler() -> None:
    """Raise BimetalError with the package to install if kernels cannot be compiled."""
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise (no_compiler(error) or error) from error


def no_compiler(error: Exception) -> BimetalError | None:
    """Name the package to install if `error` shows that CUDA's compiler is missing."""
    if "nvrtc" not in str(error).lower():
        return None
    return BimetalError(
        f"CuPy does not find CUDA's compiler NVRTC ({str(error).splitlines()[0]}); "
        "install CuPy with its toolkit: pip install 'cupy-cuda13x[ctk]'"
    )


@cache
def _module(device: int, stem: str, defines: tuple[str, ...], second: tuple[str, ...]) -> Any:
    if stem in ARCHITECTURES:
        return cubin.module(source(stem), defines, ARCHITECTURES[stem])
    return cupy.RawModule(code=source(stem, second), options=(*OPTIONS, *(f"-D{d}" for d in defines)))
