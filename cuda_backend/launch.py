"""Device memory and kernels: the arena that outputs come from, arrays over it, and compiled CUDA C++."""

import ctypes
import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError
from cuda_backend.layout import OPTIONS, UNPACKED, Packing, packed_size, source

ALIGN = 256

IN = np.dtype(
    [("p", "u8"), ("slot", "i8"), ("row", "i8"), ("head", "i8"), ("slots", "i4"), ("width", "i4"), ("inner", "i4")],
    align=True,
)
OUT = np.dtype(
    [
        *((name, "u8") for name in ("dense", "packed", "bf16")),
        *((name, "i4") for name in ("K", "cols", "groups", "fine", "whole")),
    ],
    align=True,
)
ROPE = np.dtype([("frequencies", "u8"), ("positions", "u8"), ("pairs", "i4"), ("magnitude", "f4")], align=True)
CHOICE = np.dtype(
    [
        *((name, "u8") for name in ("logits", "bias", "weights")),
        ("gate", IN),
        *((name, "i4") for name in ("E", "k", "shared", "gated")),
        ("scale", "f4"),
    ],
    align=True,
)
MATRIX = np.dtype(
    [
        *((name, "u8") for name in ("w", "out")),
        *((name, "i4") for name in ("N", "k_blocks", "units", "stripes", "each")),
        *((name, "u4") for name in ("k_blocks_inverse", "units_inverse", "stripes_inverse")),
    ],
    align=True,
)
ROWS = np.dtype(
    [("packed", "u8"), ("squares", "u8"), ("T", "i4"), ("parts", "i4"), ("columns", "f4"), ("eps", "f4")], align=True
)
PARTIALS = np.dtype([("slot", "i8"), ("row", "i8"), ("slots", "i4")], align=True)
PLACES = np.dtype([("fixed", "i4"), ("ring", "i4")])


class Kernel:
    """A compiled function.

    In a captured graph, on compute capability 9.0 and newer, its launch may overlap the end of the kernel before it:
    every kernel of ours waits (prelude.cuh `depend`) before it touches what a step writes.
    """

    overlap = False  # set while a graph that overlaps is captured
    apart = False  # the next launch, on whichever stream, waits for another stream: it overlaps nothing
    launches = 0  # of all kernels, replayed ones too

    def __init__(self, raw: Any):
        self.raw = raw

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0, *, stream: Any
    ) -> None:
        Kernel.launches += 1
        overlap, Kernel.apart = Kernel.overlap and not Kernel.apart, False
        if not overlap:
            self.raw(grid, block, args, shared_mem=shared_mem, stream=stream)
            return
        values = [np.asarray(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
        attribute = _Attribute(id=6)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value[0] = 1
        dims = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        config = _Config(*dims, shared_mem, stream.ptr, ctypes.pointer(attribute), 1)
        status = _driver().cuLaunchKernelEx(
            ctypes.byref(config), ctypes.c_void_p(self.raw.kernel.ptr), pointers, ctypes.c_void_p()
        )
        if status:
            raise RuntimeError(f"cuLaunchKernelEx returned {status} for {self.raw.name}")


class Graph:
    """What is launched on a stream from now until `end`, to be replayed."""

    def __init__(self, stream: cupy.cuda.Stream, overlap: bool):
        self.stream, self.before = stream, Kernel.launches
        stream.begin_capture()
        Kernel.overlap = overlap

    def end(self) -> None:
        Kernel.overlap = False
        self.kernels, Kernel.launches = Kernel.launches - self.before, self.before  # none has run yet
        self.graph = self.stream.end_capture()

    def launch(self) -> None:
        Kernel.launches += self.kernels
        self.graph.launch(self.stream)


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
    """The function `name` of kernels/<stem>.cu, compiled on first use and kept in CuPy's cache on disk.

    defines  preprocessor definitions, "COLS=8"
    shared   most dynamic shared memory that a launch will ask for, bytes
    second   definitions of a second matrix: layout.py `source`
    """
    return _kernel(cupy.cuda.runtime.getDevice(), stem, name, defines, shared, second)


@cache
def _kernel(
    device: int, stem: str, name: str, defines: tuple[str, ...], shared: int, second: tuple[str, ...]
) -> Kernel:
    """The function on the current device, which is `device`: each has its own, with its own shared memory."""
    try:
        function = _module(device, stem, defines, second).get_function(name)
        _ = function.kernel  # compiles it
    except cupy.cuda.compiler.CompileException as error:
        raise BimetalError(f"NVRTC cannot compile kernels/{stem}.cu: {str(error).splitlines()[0]}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise (no_compiler(error) or error) from error
    if shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared
    return Kernel(function)


def check_compiler() -> None:
    """Raises BimetalError with what to install where kernels cannot be compiled."""
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise (no_compiler(error) or error) from error


def no_compiler(error: Exception) -> BimetalError | None:
    """What to install where `error` says that CUDA's compiler is missing."""
    if "nvrtc" not in str(error).lower():
        return None
    return BimetalError(
        f"CuPy does not find CUDA's compiler NVRTC ({str(error).splitlines()[0]}); "
        "install CuPy with its toolkit: pip install 'cupy-cuda13x[ctk]'"
    )


@cache
def _module(device: int, stem: str, defines: tuple[str, ...], second: tuple[str, ...]) -> Any:
    return cupy.RawModule(code=source(stem, second), options=(*OPTIONS, *(f"-D{d}" for d in defines)))


class Memory:
    """Device memory that lives as long as this object."""

    def __init__(self, nbytes: int):
        try:
            self._memory = cupy.cuda.alloc(max(nbytes, 1))
        except cupy.cuda.memory.OutOfMemoryError:
            (free, total), device = cupy.cuda.runtime.memGetInfo(), cupy.cuda.runtime.getDevice()
            raise BimetalError(
                f"GPU {device} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free and {nbytes / 1e9:.1f} GB more are "
                "needed; choose a smaller quantization or a shorter context"
            ) from None
        self.address: int = self._memory.ptr
        self.nbytes = nbytes


class Arena:
    """Memory for what one step computes, in two halves: `turn` frees the half that was used before the current one.

    A layer's output lies in its own half, so it survives the next layer and no longer; what must last longer lies in a
    third part. Memory that a captured graph has used is never given back.
    """

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self.parts: list[list[Memory]] = [[], [], []]
        self.passing = Memory(0)
        self.frozen = False  # while a graph is captured, whose addresses must not come from anyone else
        self.reset()

    def reset(self) -> None:
        self.half, self.used = 0, [[0] * len(chunks) for chunks in self.parts]  # bytes of each chunk

    def turn(self) -> None:
        self.half = 1 - self.half
        self.used[self.half] = [0] * len(self.parts[self.half])

    def take(self, nbytes: int, lasting: bool = False) -> int:
        """The first chunk with room gives it, so that a step that runs once more takes what it took before."""
        part = 2 if lasting else self.half
        chunks, used = self.parts[part], self.used[part]
        at = next((i for i, chunk in enumerate(chunks) if used[i] + nbytes <= chunk.nbytes), len(chunks))
        if at == len(chunks):
            if self.frozen:
                raise RuntimeError("a captured step took more memory than the same step run before it")
            chunks.append(Memory(max(nbytes, self.CHUNK)))
            used.append(0)
        address = chunks[at].address + used[at]
        used[at] += -(-nbytes // ALIGN) * ALIGN
        return address

    def scratch(self, nbytes: int, stream: Any) -> int:
        """Memory for what the next launch on `stream` reads and nothing after it: the same at every call."""
        if nbytes > self.passing.nbytes:
            stream.synchronize()
            self.passing = Memory(nbytes)
        return self.passing.address

    @property
    def nbytes(self) -> int:
        return self.passing.nbytes + sum(chunk.nbytes for part in self.parts for chunk in part)


class Node:
    """A row-wise op that has not run: (T, K) float32 that its consumer may want dense, as bf16 or packed for `linear`.

    emit(dense, packed, bf16, packing)  launches it, writing where an address is not 0
    """

    def __init__(self, arena: Arena, T: int, K: int, emit: Callable[[int, int, int, Packing], None]):
        self.arena, self.T, self.K, self.emit = arena, T, K, emit
        self.dense = self.bf16 = 0
        self.reads: Array | None = None  # of which `emit` has the address alone
        self.packed: dict[Packing, int] = {}
        self.unscaled: Callable[[int, Packing, int, int], bool] | None = None  # (packed, packing, squares, dense)
        self.loose_dense = 0
        self.eps = 0.0  # of that norm
        self.loose: dict[Packing, tuple[int, int]] = {}
        self.parts: tuple[Array, Array] | None = None  # of an addition, which a norm may do on its way
        self.roping: tuple[Array, tuple[Any, ...]] | None = None  # of norm and rope, which attention may do on its way
        self.norm: tuple[Array, Array | None, float] | None = None  # of a norm, which a cache may do on its way
        self.pieces: Callable[..., None] | None = None  # as emit, with `op` and `gate` of a gate on attention's output
        self.experts: tuple[Array, Array] | None = None  # of a weighted sum, which an addition may do on its way
        self.joined: tuple[Any, ...] = ()  # of a weighted sum in fours, defines and arguments: a norm may do it

    def as_dense(self) -> int:
        if not self.dense:
            self.dense = self.arena.take(self.T * self.K * 4)
            self.emit(self.dense, 0, 0, UNPACKED)
        return self.dense

    def as_bf16(self) -> int:
        if not self.bf16:
            self.bf16 = self.arena.take(self.T * self.K * 2)
            self.emit(0, 0, self.bf16, UNPACKED)
        return self.bf16

    def as_packed(self, packing: Packing) -> int:
        """int8 activations for a product."""
        if packing not in self.packed:
            self.packed[packing] = self.arena.take(packed_size(self.K, self.T, packing))
            self.emit(0, self.packed[packing], 0, packing)
        return self.packed[packing]

    def as_unscaled(self, packing: Packing) -> tuple[int, int]:
        """A norm's int8 rows without the factor of the whole row, and the squares (T, K / 128) that give it.

        Squares at 0: there is no such form, and these are the rows themselves.
        """
        if packing not in self.loose and self.unscaled:
            packed = self.arena.take(packed_size(self.K, self.T, packing))
            squares = self.arena.take(self.T * -(-self.K // 128) * 4)
            if self.unscaled(packed, packing, squares, 0):
                self.loose[packing] = packed, squares
        if packing in self.loose:
            return self.loose[packing]
        return self.as_packed(packing), 0

    def twin(self) -> "Node":
        """The same for another stream, which must not take what this one writes from now on."""
        other = copy(self)
        other.packed, other.loose = dict(self.packed), dict(self.loose)
        return other

    def as_unscaled_dense(self) -> tuple[int, int]:
        """The same in float32 for a router, and the int8 rows that its experts want in the same launch."""
        if not self.unscaled:
            return self.as_dense(), 0
        if not self.loose_dense:
            rows = Packing(1, False)  # of experts of types of which whole numbers are summed; others ask again
            packed = self.arena.take(packed_size(self.K, self.T, rows))
            dense, squares = self.arena.take(self.T * self.K * 4), self.arena.take(self.T * -(-self.K // 128) * 4)
            if not self.unscaled(packed, rows, squares, dense):
                return self.as_dense(), 0
            self.loose_dense, self.loose[rows] = dense, (packed, squares)
        return self.loose_dense, self.loose[Packing(1, False)][1]


class Array:
    """An activation: float32 or int32 on the device, perhaps not computed yet, perhaps partial sums to be added.

    Models see `shape`, reshape and slice. Strides are in elements; `slots` partial sums lie `slot` elements apart.
    `needs` tells where columns of (T, n) end that have fewer, and how many: zeros follow, which a slice leaves out.
    `best` is where the largest keys of a step's logits lie, if they were found: kernels/sample.cu.
    """

    __slots__ = ("_address", "best", "dtype", "needs", "node", "owner", "shape", "slot", "slots", "strides")

    def __init__(
        self,
        shape: Sequence[int],
        address: int = 0,
        *,
        strides: Sequence[int] | None = None,
        node: Node | None = None,
        slots: int = 1,
        slot: int = 0,
        needs: Sequence[tuple[int, int]] = (),
        owner: Any = None,
        dtype: Any = np.float32,
        best: int = 0,
    ):
        self.shape = tuple(shape)
        self.needs, self.best = needs, best
        self.strides = tuple(strides) if strides is not None else contiguous(self.shape)
        self._address, self.node, self.slots, self.slot, self.owner, self.dtype = (
            address,
            node,
            slots,
            slot,
            owner,
            dtype,
        )

    @property
    def address(self) -> int:
        return self._address or (self.node.as_dense() if self.node else 0)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Is it computed and added up, its elements one behind the other?"""
        return bool(self._address) and self.slots == 1 and self.strides == contiguous(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> "Array":
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if -1 in wanted:
            rest = -math.prod(wanted)
            wanted = tuple(self.size // rest if n == -1 else n for n in wanted)
        if self.node and not self._address:
            return Array(wanted, node=self.node)
        return self._view(wanted, reshaped(self.shape, self.strides, wanted), 0)

    def __getitem__(self, index: Any) -> "Array":
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            rest = len(self.shape) - len(index) + 1
            index = (*index[:at], *(slice(None),) * rest, *index[at + 1 :])
        offset, shape, strides = 0, [], []
        for i, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            at = index[i] if i < len(index) else slice(None)
            if isinstance(at, slice):
                start, stop, step = at.indices(n)
                offset += start * stride
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
            else:
                offset += at * stride
        if self.node and not self._address and offset == 0 and tuple(shape) == self.shape:
            return self
        slots = self.slots
        if self.needs and len(index) == 2 and shape[1]:  # of the segments that the slice touches
            first, last = offset % self.shape[1], offset % self.shape[1] + shape[1]
            begins = (0, *(end for end, _ in self.needs))
            slots = max(n for begin, (end, n) in zip(begins, self.needs, strict=False) if begin < last and end > first)
        return self._view(shape, strides, offset, slots)

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int, slots: int = 0) -> "Array":
        return Array(
            shape,
            self.address + 4 * offset,
            strides=strides,
            slots=slots or self.slots,
            slot=self.slot,
            owner=self.owner,
            dtype=self.dtype,
        )

    def whole_node(self) -> Node | None:
        """The op that would compute exactly this array, if it has not been sliced."""
        return None if self._address else self.node


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= size
    return tuple(reversed(strides))


def reshaped(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """The strides of a reshape that moves nothing; raises ValueError where there are none."""
    if math.prod(shape) != math.prod(wanted):
        raise ValueError(f"an array of shape {tuple(shape)} cannot be reshaped to {tuple(wanted)}")
    # runs of axes that lie behind one another: (elements, stride of the last)
    runs: list[list[int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = [runs[-1][0] * n, stride]
        else:
            runs.append([n, stride])
    out, left = [], 1
    for n in reversed(wanted):
        if n == 1:
            out.append(left)
            continue
        if left == 1:
            size, unit = runs.pop() if runs else [n, 1]
            left = size
        if left % n:
            raise ValueError(f"a view of shape {tuple(shape)} cannot be reshaped to {tuple(wanted)} without a copy")
        out.append(unit)
        unit, left = unit * n, left // n
    return tuple(reversed(out))
