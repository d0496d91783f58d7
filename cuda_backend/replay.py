"""Steps in device memory, and captured programs: one per function and Shape, valid at every position.

The inputs that change between steps (lengths, positions, tokens, masks, the committed path) are copied to fixed
addresses before each run. Kernels read the inputs there, so that a captured graph stays valid.
"""

import ctypes
import struct
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS, PAST, Repeated, Step
from cuda_backend.arrays import Array
from cuda_backend.launch import Graph, Stream
from cuda_backend.memory import Arena, Memory
from cuda_backend.runs import MAX_RUNS, NUMBERS, Run, RunInputs, Runs
from cuda_backend.segments import Program, Shape, run_step
from cuda_backend.to_host import Arrival
from cuda_backend.tree_order import depth_first, lines

Table = MutableMapping[Shape, Program | None]  # captured steps of a function; None: the step has run once, not captured

BUCKETS = (1, 8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 136)

LONG_PAST = 4096  # committed tokens from which attention takes larger blocks of rows: docs/experiments/attention.md
LONG_ROWS = 1024  # most rows of a captured long step: up to here the device waits for launches of the host
LONG_PROGRAMS = 32  # captured long steps that are kept, per function

# kernels/prelude.cuh StepState: its leading numbers, the offsets of its other fields, and its end
HEAD = struct.Struct("3i4x2Q")  # rows, runs, kept, and the addresses for greedy tokens, on the device and the host
PATH = 64
SEEN = PATH + 4 * MAX_DECODE_ROWS
SEEN_BYTES = -(-MAX_DECODE_ROWS // 32) * 4  # bytes per row
LINE = SEEN + MAX_DECODE_ROWS * SEEN_BYTES
MOVES = LINE + 4 * MAX_DECODE_ROWS
PARENTS = MOVES + MAX_DECODE_ROWS
RUN_OF = PARENTS + MAX_DECODE_ROWS
RUNS = RUN_OF + MAX_DECODE_ROWS + 8
END = RUNS + MAX_RUNS * 4 * NUMBERS


@dataclass(frozen=True)
class DeviceStep:
    """The `step` that ops receive: T rows, padding included; device memory has their number and sequences.

    address       address of the StepState
    runs          largest number of sequences
    one_row_each  whether each of several sequences has one row
    long_past     as Shape.long_past
    is_block      whether all rows of a sequence see each other
    slot, past    slot and committed positions of the only sequence of a prefill step
    hidden        as Step.hidden
    """

    tokens: Array
    positions: Array
    address: int
    T: int
    owner: Any = None
    runs: int = 1
    one_row_each: bool = False
    long_past: bool = False
    is_block: bool = False
    slot: int = 0
    past: int = 0
    hidden: Array | None = None

    @property
    def prefill(self) -> bool:
        return self.T > MAX_DECODE_ROWS

    def __len__(self) -> int:
        return self.T


def visible_masks(parents: list[int] | None, T: int) -> bytes:
    """Encode Step.visible: for each of T rows a bit mask of the rows that it sees; `parents` None: a block."""
    rows = [(1 << T) - 1] * T if parents is None else []
    for row, parent in enumerate(parents or ()):
        rows.append((rows[parent] if parent != PAST else 0) | 1 << row)
    return b"".join([row.to_bytes(SEEN_BYTES, "little") for row in rows])


@cache
def chain_masks(T: int, is_block: bool) -> bytes:
    """Return `visible_masks` for a chain of T rows, or for a block."""
    return visible_masks(None if is_block else list(range(PAST, T - 1)), T)


@cache
def _single_rows(nbytes: int, T: int) -> bytes:
    """Return the bytes of an Inputs with one row of each of T sequences; all other fields are zero."""
    before = bytes(SEEN) + T * chain_masks(1, False)
    return (before.ljust(RUN_OF, b"\0") + bytes(range(T))).ljust(nbytes, b"\0")


@lru_cache(64)
def _unbranched(nbytes: int, runs: Runs, is_block: bool) -> bytes:
    """Return the bytes of an Inputs in which each run is a chain, or a block; all other fields are zero."""
    host = bytearray(nbytes)
    _put_rows(host, None if is_block else runs.chains.tolist(), runs)
    return bytes(host)


def _put_rows(host: bytearray, all_parents: list[int] | None, runs: Runs) -> list[int]:
    """Write which rows see each other, and their order, by Step.parents; return `branches` of Runs.numbers."""
    masks, run_of, branches = list[bytes](), list[int](), [0] * len(runs)

    def put(offset: int, data: bytes) -> None:
        host[offset : offset + len(data)] = data

    for number, (_, first, rows) in enumerate(runs):
        # a single row continues the past: its parents need not be read
        parents = None if all_parents is None or rows == 1 else all_parents[first : first + rows]
        if parents is not None and first:
            parents = [parent if parent == PAST else parent - first for parent in parents]
        is_chain = parents is None or parents == list(range(PAST, rows - 1))
        masks.append(chain_masks(rows, parents is None) if is_chain else visible_masks(parents, rows))
        run_of += [number] * max(rows, 1)
        if parents is not None and not is_chain:
            order, moves, predecessors = depth_first(parents)
            branches[number] = 1
            put(LINE + 4 * first, bytes(chain.from_iterable(lines(order, predecessors))))
            put(MOVES + first, bytes(moves))
            put(PARENTS + first, bytes(i % 256 for i in predecessors))
    put(SEEN, b"".join(masks))
    put(RUN_OF, bytes(run_of))
    return branches


class Inputs:
    """Device memory at a fixed address, from which kernels and captured graphs read a step of at most `rows` rows.

        0                      numbers of rows and runs, the store that holds the rows of paths, addresses: HEAD
        PATH                   committed rows of the preceding step, of all runs
        SEEN                   for each row a bit mask of the rows that it sees
        LINE, MOVES, PARENTS   the order in which recurrent layers compute the rows of trees
        RUN_OF, RUNS           the run of each row, and the runs: Runs.numbers
        END                    positions, then tokens, `rows` int32 each

    `upload` writes this memory before each step: one copy for what the host knows, another one for tokens that the
    device has drawn. Greedy tokens need no copy, since the kernel that chooses them also writes them to the address of
    `place_for`.
    """

    def __init__(self, rows: int, stream: Stream):
        self.rows, self.stream = rows, stream
        self.memory = Memory(END + 8 * rows, stream)
        self.tokens = self.memory.address + END + 4 * rows
        self.sampled: Array | None = None  # the array whose tokens a kernel wrote there too: `place_for`
        self.hidden: dict[int, Memory] = {}  # by columns; kept, since captured graphs have the addresses
        self._keys: dict[int, Memory] = {}  # by keys of each row; kept as well
        self.steps: dict[tuple[Shape, bool], DeviceStep] = {}
        cupy.cuda.runtime.memsetAsync(self.memory.address, 0, self.memory.nbytes, stream.ptr)

    def place_for(self, tokens: Array) -> int:
        """Return an address to which a kernel should also write `tokens`, so that the next step need not copy them."""
        self.sampled = tokens
        return self.tokens

    def keys(self, count: int) -> int:
        """Return the address of `count` keys of 8 bytes for each row, by which kernels/sample.cu compares logits."""
        if count not in self._keys:
            self._keys[count] = Memory(8 * self.rows * count, self.stream)
        return self._keys[count].address

    def upload(self, step: Step, run_inputs: RunInputs, arrival: Arrival | None = None) -> None:
        """Put a step together in host memory, and queue its copy to the device on the stream.

        arrival  to which the most probable tokens of its rows will be written

        Steps without trees that branch begin as copies of templates, in which only the head, the path, the runs,
        positions and tokens are missing. Other steps begin as zeros.
        """
        T, runs, nbytes, parents = len(step), run_inputs.runs, self.memory.nbytes, step.parents
        branches: Sequence[int] = ()
        # bytes and arrays of Python, because the device waits for this code, and NumPy's records take twice as long
        if T > MAX_DECODE_ROWS:
            host = bytearray(nbytes)
        elif one_row_each(step, runs):
            host = bytearray(_single_rows(nbytes, T))
        elif parents is None or parents.tobytes() == runs.chains.tobytes():
            host = bytearray(_unbranched(nbytes, runs, parents is None))
        else:
            host = bytearray(nbytes)
            branches = _put_rows(host, parents.tolist(), runs)
        places = (arrival.on_device, arrival.address) if arrival else (0, 0)
        HEAD.pack_into(host, 0, T, len(runs), run_inputs.path_store, *places)
        if path := list(chain.from_iterable(run_inputs.paths)):
            struct.pack_into(f"{len(path)}i", host, PATH, *path)
        kind = 1 if T > MAX_DECODE_ROWS else 2 if parents is None else 0
        host[RUNS : RUNS + 4 * NUMBERS * len(runs)] = runs.numbers(run_inputs, kind, branches)
        host[END : END + 4 * T] = np.asarray(step.positions, np.int32).tobytes()
        size, on_host = END + 4 * self.rows, not isinstance(step.tokens, Array)
        if on_host:
            host[size : size + 4 * T] = np.asarray(step.tokens, np.int32).tobytes()
            size = len(host)
        runtime = cupy.cuda.runtime
        address = ctypes.addressof(ctypes.c_char.from_buffer(host))
        runtime.memcpyAsync(self.memory.address, address, size, runtime.memcpyHostToDevice, self.stream.ptr)
        if step.tokens is not self.sampled:
            self.sampled = None
            if not on_host:  # sampled at random, or by an earlier step than the last
                size, source = 4 * T, step.tokens.address
                runtime.memcpyAsync(self.tokens, source, size, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def place_hidden(self, hidden: Array | None) -> Array | None:
        """Copy a step's hidden states (T, n) float32 to an address that is the same for all steps with n columns."""
        if hidden is None:
            return None
        T, n = hidden.shape
        if n not in self.hidden:
            self.hidden[n] = Memory(4 * self.rows * n, self.stream)
        memory = self.hidden[n]
        runtime, size = cupy.cuda.runtime, 4 * T * n
        runtime.memcpyAsync(memory.address, hidden.address, size, runtime.memcpyDeviceToDevice, self.stream.ptr)
        return Array((T, n), memory.address, owner=memory)

    def step(self, shape: Shape, is_block: bool = False) -> DeviceStep:
        """Describe the uploaded step, which has this shape."""
        if (shape, is_block) not in self.steps:
            positions = self.memory.address + END
            self.steps[shape, is_block] = DeviceStep(
                Array((shape.T,), self.tokens, dtype=np.int32),
                Array((shape.T,), positions, dtype=np.int32),
                self.memory.address,
                shape.T,
                self.memory,
                shape.runs,
                shape.one_row_each,
                shape.long_past,
                is_block,
            )
        return self.steps[shape, is_block]


class Replay:
    """Run step functions on one GPU, eagerly or by replaying a captured program: segments.run_step."""

    def __init__(self, arena: Arena, stream: Stream, side_stream: Stream, overlap: bool, captures_long: bool):
        self.arena, self.stream, self.side_stream, self.captures_long = arena, stream, side_stream, captures_long
        self.decode_inputs = Inputs(MAX_DECODE_ROWS, stream)
        self.long_inputs: Inputs | None = None  # of steps that may be captured
        self.larger_inputs: Inputs | None = None
        self.overlap = overlap
        self.active: DeviceStep | None = None  # the step whose ops are being launched
        self._replayed: dict[Any, Graph | None] = {}
        self.built = 0  # calls of `replayed` so far that launched or captured

    def run(
        self, fn: Callable[[Any, DeviceStep], Any], state: Any, step: Step, arrival: Arrival | None = None
    ) -> tuple[Any, int]:
        """Run fn(state, step); returns (result in arena memory, which the next run overwrites; number of real rows).

        arrival  as in Inputs.upload
        """
        pool, runs = state.pool, state.runs(step)
        check(step, runs, pool.lengths, state.capacity)
        pool.note_runs(step, runs)
        shape, table = shape_of(pool, step, runs), table_of(state, fn)
        device_step = self.uploaded(self.inputs_for(step), shape, step, pool.inputs(step, runs), arrival)
        repeats = self.captures_long and pool.captures_long and isinstance(fn, Repeated)
        if repeats and MAX_DECODE_ROWS < shape.T <= LONG_ROWS:
            return self._run_long(fn, state, device_step, table), len(step)
        call, captured = (partial(run, fn, state, device_step) for run in (self._call, self._captured))
        out = run_step(table, shape, call, captured)
        return out, len(step)

    def _run_long(self, fn: Callable[[Any, DeviceStep], Any], state: Any, device_step: DeviceStep, table: Table) -> Any:
        """Run a long step as run_step runs a short one; drop the least recently used programs.

        A program is captured for one slot and length, and replayed for all others, since its kernels read slot and
        length from the StepState.
        """
        shape = Shape(device_step.T)
        has_run, program = shape in table, table.pop(shape, None)
        if program is not None and program.scratch is not self.arena.passing:  # the scratch memory has grown since
            has_run, program = False, None
        if not has_run:
            out = self._call(fn, state, device_step)
            table[shape] = None
            return out
        if program is None:
            try:
                program = self._captured(fn, state, device_step, overlap=False)._replace(scratch=self.arena.passing)
            except NotImplementedError:  # cuBLAS was not found, and CuPy's calls of it cannot be captured: gemm.py
                self.captures_long = False
                return self._call(fn, state, device_step)
        table[shape] = program  # last in the table: the most recently used
        for segment in program.segments:
            segment.play()
        for old in [each for each in table if each.T > MAX_DECODE_ROWS][:-LONG_PROGRAMS]:
            del table[old]
        return program.out

    def upload(self, pool: Any, step: Step, runs: Runs, arrival: Arrival | None = None) -> DeviceStep:
        """Upload a noted step of a CudaPool to the memory that graphs read; `arrival` as in Inputs.upload."""
        shape = shape_of(pool, step, runs)
        return self.uploaded(self.inputs_for(step), shape, step, pool.inputs(step, runs), arrival)

    def uploaded(
        self, inputs: Inputs, shape: Shape, step: Step, run_inputs: RunInputs, arrival: Arrival | None = None
    ) -> DeviceStep:
        """Upload a step to `inputs`, for launches of `shape`; `arrival` as in Inputs.upload."""
        inputs.upload(step, run_inputs, arrival)
        if shape.T <= MAX_DECODE_ROWS:
            return inputs.step(shape, step.parents is None)
        hidden = inputs.place_hidden(step.hidden)
        slot, past = run_inputs.runs.slots[0], run_inputs.pasts[0]
        return replace(inputs.step(Shape(shape.T)), slot=slot, past=past, hidden=hidden)

    def inputs_for(self, step: Step, separate: bool = False) -> Inputs:
        """Return memory for a step: the memory that graphs read, or separate memory for a call outside of `run`."""
        T = len(step)
        if T <= MAX_DECODE_ROWS:
            return Inputs(MAX_DECODE_ROWS, self.stream) if separate else self.decode_inputs
        if not step.is_chain:
            raise BimetalError(f"a tree or block has {T} rows; the CUDA kernels take at most {MAX_DECODE_ROWS}")
        if separate:
            return Inputs(T, self.stream)
        if T <= LONG_ROWS:
            self.long_inputs = self.long_inputs or Inputs(LONG_ROWS, self.stream)
            return self.long_inputs
        if self.larger_inputs is None or self.larger_inputs.rows < T:
            self.larger_inputs = Inputs(-(-T // 512) * 512, self.stream)
        return self.larger_inputs

    def _call(self, fn: Callable[[Any, DeviceStep], Any], state: Any, step: DeviceStep) -> Any:
        self.arena.reset()
        self.active = step
        try:
            return fn(state, step)
        finally:
            self.active = None

    def replayed(self, key: Any, launch: Callable[[], object]) -> None:
        """Call `launch`, whose kernels and their arguments depend on `key` alone, or replay what it launched.

        The first call, in which kernels may be compiled, is not captured.
        """
        if key not in self._replayed:
            self.built += 1
            launch()
            self._replayed[key] = None
            return
        graph = self._replayed[key]
        if graph is None:
            self.built += 1
            graph = self.graph(overlap=False)
            try:
                launch()
            finally:
                graph.end()
            self._replayed[key] = graph
        graph.play()

    def graph(self, overlap: bool = True) -> Graph:
        """Begin a graph that captures the following launches; with `overlap` kernels may overlap if the GPU can."""
        return Graph((self.stream, self.side_stream), self.overlap and overlap)

    def _captured(
        self, fn: Callable[[Any, DeviceStep], Any], state: Any, step: DeviceStep, overlap: bool = True
    ) -> Program:
        self.arena.frozen = True
        graph = self.graph(overlap)
        try:
            out = self._call(fn, state, step)
        finally:
            self.arena.frozen = False
            graph.end()
        return Program([graph], out)


def check(step: Step, runs: Sequence[Run], lengths: Sequence[int], capacity: int) -> None:
    """Refuse a step that exceeds `capacity` of a sequence; `lengths` are the committed tokens of each slot."""
    if runs and max([lengths[slot] + rows for slot, _, rows in runs]) <= capacity:
        return
    for slot, _, rows in runs:
        past = lengths[slot]
        if past + rows > capacity + MAX_DECODE_ROWS or (rows > MAX_DECODE_ROWS and past + rows > capacity):
            raise BimetalError(f"{rows} more tokens do not fit the context of {capacity}, of which {past} are used")
    if len(step) == 0:
        raise ValueError("a step needs at least one row")


@cache
def bucket(T: int) -> int:
    """Return the number of rows of the graph for T rows; for a prefill step, longer than any bucket, T itself."""
    return T if T > MAX_DECODE_ROWS else next(b for b in BUCKETS if b >= T)


def shape_of(pool: Any, step: Step, runs: Runs) -> Shape:
    T = bucket(len(step))
    if one_row_each(step, runs):
        return Shape(T, min(pool.slots, T), True)
    return Shape(T, min(pool.slots, T), False, long_past(step, [pool.lengths[slot] for slot in runs.slots]))


def one_row_each(step: Step, runs: Sequence[Run]) -> bool:
    """Test whether a step has several sequences and one row of each."""
    return 1 < len(step) == len(runs)


def long_past(step: Step, pasts: Sequence[int]) -> bool:
    """Test whether rows of a step share a sequence of LONG_PAST committed tokens or more: `pasts` by sequence."""
    return len(step) > len(pasts) and max(pasts) >= LONG_PAST


def table_of(state: Any, fn: Callable[..., Any]) -> Table:
    """Return the captured steps of `fn`; for a step that calibrates, which occurs once, an empty table."""
    table: Table = {} if state.calibrates else state.graphs.setdefault(fn, {})
    return table


def graphs() -> Any:
    """Make an empty table of captured steps by function; an entry is dropped when its function is deleted."""
    return weakref.WeakKeyDictionary()
