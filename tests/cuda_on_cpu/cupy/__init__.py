"""The part of CuPy that cuda_backend uses, over host memory: g++ compiles kernels, and ../simt.h runs them.

With this folder on PYTHONPATH in CuPy's place, the tests marked `gpu` execute our kernels on any x86-64 Linux.
Instructions that C++ lacks (tensor cores, asynchronous copies, matrix loads) are replaced by the functions below.

BIMETAL_GPUS pretends several GPUs: a launch, a copy or an event under another current GPU than its own is refused, and
so is a kernel that is handed memory of another GPU, but for peers' memory that it may reach. What a GPU is given runs
at once; after a kernel that waits for another GPU it is queued until that one has gone on. Where the host then waits,
the kernel is told that nobody will go on. BIMETAL_CAPABILITY=75 pretends a T4, whose kernels are made of the
instructions of compute capability 7.5.

`clock` counts what a timeline of real GPUs would show: each kernel takes 1 on its stream, a stream waits for events and
for the host that launches, and the host waits where it synchronises, but takes no time itself.
"""

import bisect
import ctypes
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

HERE = Path(__file__).parent
SIMT = HERE.parent / "simt.h"
sys.path += str(HERE.parents[1]), str(HERE.parents[2])
from simt import build  # noqa: E402

from cuda_backend.prototypes import prototypes, type_of  # noqa: E402

CAPABILITY = int(os.environ.get("BIMETAL_CAPABILITY", "80"))  # that kernels are built for
TURING = CAPABILITY < 80
IN_SIMT = ["from_half", "to_half", "release_next", "depend", "shared_address", "prefetch", "prefetch_l1"]
IN_SIMT += ["store_number", "load_number", "is_late", "give_up"]
IN_SIMT += ["permuted", "mul_half2", "add_half2", "fma_half2", *(() if TURING else ("to_half2", "to_bf16x2"))]
RING = r"""
struct Barrier { unsigned short expected, arrived; unsigned phase; };
static Barrier& barrier_at(u32 at) { return *(Barrier*)(block_memory + at); }
static void barrier_init(u32 at, int count) { barrier_at(at) = {(unsigned short)count, 0, 0}; }
static void barrier_arrive(u32 at) {
    Barrier& b = barrier_at(at);
    if (++b.arrived == b.expected) b.arrived = 0, b.phase++;
}
static void barrier_wait(u32 at, u32 parity) { while (barrier_at(at).phase % 2 == parity) wait_for_others(); }
static void copy(u32 to, const u8* from, int bytes, u32, int lane, bool = false) {
    for (int i = lane * 16; i < bytes; i += 512) memcpy(block_memory + to + i, from + i, 16);
}
static void copies_arrive(u32 full) { barrier_arrive(full); }
static void copies_end() {}
"""
PRODUCT = r"""
#if MINS
typedef unsigned char Code;
#else
typedef signed char Code;
#endif
static float of_code(Code code) { return code; }
static const int start[4] = {START, START, START, START};
static void mma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    multiply_fragments<Code, signed char, int, 32>(a, b, start, c, of_code, of_int8);
}
static void mma_half(int (&c)[4], u32 a0, u32 a1, u32 b) {
    const u32 a[2] = {a0, a1};
    multiply_fragments<Code, signed char, int, 16>(a, &b, start, c, of_code, of_int8);
}
static void less_128(u32& x) {
    x = to_bf16x2(from_bf16_bits((u16)x) - 128, from_bf16_bits((u16)(x >> 16)) - 128);
}
static void mma_bf16(float (&c)[4], u32 a0, u32 a1, uint2 b) {
    const u32 a[4] = {a0, a1, a0, a1};
    multiply_fragments<u16, u16, float, 16>(a, &b, nullptr, c, from_bf16_bits, from_bf16_bits);
}
"""
COPIES = r"""
static void copy16(u32 to, const u16* from) { memcpy(block_memory + to, from, 16); }
static void commit() {}
"""
LOADS = r"""
struct Load { u32 at; u32* to; };
static void ldmatrix(u32 (&r)[4], u32 at) {
    Load load{at, r};
    together(&load, [](void** lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                memcpy(((Load*)lanes[lane])->to + i,
                       block_memory + ((Load*)lanes[i * 8 + lane / 4])->at + lane % 4 * 4, 4);
    });
}
static void ldmatrix_transposed(u32 (&r)[4], u32 at) {
    Load load{at, r};
    together(&load, [](void** lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++)
                    memcpy((u16*)(((Load*)lanes[lane])->to + i) + e,
                           block_memory + ((Load*)lanes[i * 8 + lane % 4 * 2 + e])->at + lane / 4 * 2, 2);
    });
}
"""
FLOAT16 = r"""
static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    multiply_fragments<u16, u16, float, 16>(a, b, c, c, from_half, from_half);
}
"""
HOPPER = r"""
static void wgmma(float (&d)[N / 2], u32 a, u32 b, bool adds) {
    a = (a & 0x3fff) * 16, b = (b & 0x3fff) * 16;
    const auto element = [](u32 at) { return from_half(*(u16*)(block_memory + (at ^ (at >> 7 & 7) << 4))); };
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < N / 2; i++) {
        const int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = adds ? d[i] : 0;
        for (int k = 0; k < 16; k++) {
            const u32 at = TRANSPOSED ? k * 128 + row * 2 : row * 128 + k * 2;
            sum += (double)element(a + at) * element(b + column * 128 + k * 2);
        }
        d[i] = (float)sum;
    }
}
static float exp2_for_half(float x) { return exp2f(x); }
struct Group { unsigned short arrived; unsigned phase; };  // begin as -1
__shared__ Group groups_of_threads[16];
static void threads_sync(int id, int threads) {
    Group& all = groups_of_threads[id];
    const unsigned phase = all.phase;
    if (++all.arrived == threads - 1) {
        all.arrived = 0xffff, all.phase++;
        return;
    }
    while (all.phase == phase) wait_for_others();
}
static void group_sync(int id) { threads_sync(id, 128); }
static void two_groups_sync(int id) { threads_sync(id, 256); }
struct Store { u32 at, matrix[4]; };
static void stmatrix_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
    Store store{at, {a, b, c, d}};
    together(&store, [](void** lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++)
                    memcpy(block_memory + ((Store*)lanes[i * 8 + lane % 4 * 2 + e])->at + lane / 4 * 2,
                           (u16*)(((Store*)lanes[lane])->matrix + i) + e, 2);
    });
}
"""
HOPPER_64 = r"""
struct Products { float* d; const u32* a; u32 a_at, b_at; bool adds; };
static void multiply_64(Products own) {  // a of registers, or of shared memory
    together(&own, [](void** lanes) {
        const auto element = [](u32 at) { return from_half(*(u16*)(block_memory + (at ^ (at >> 7 & 7) << 4))); };
        for (int lane = 0; lane < 32; lane++) {
            const Products& p = *(Products*)lanes[lane];
            for (int i = 0; i < 32; i++) {
                const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                double sum = p.adds ? p.d[i] : 0;
                for (int k = 0; k < 16; k++) {
                    if (p.a) {
                        const u32 pair = ((Products*)lanes[row % 8 * 4 + k % 8 / 2])->a[k / 8 * 2 + row / 8];
                        sum += (double)from_half((u16)(pair >> k % 2 * 16)) * element(p.b_at + k * 128 + column * 2);
                    } else {
                        sum += (double)element(p.a_at + row * 128 + k * 2) * element(p.b_at + column * 128 + k * 2);
                    }
                }
                p.d[i] = (float)sum;
            }
        }
    });
}
static void wgmma_64(float (&d)[32], u32 a, u32 b, bool adds) {
    multiply_64({d, nullptr, (a & 0x3fff) * 16 + threadIdx.x / 32 % 4 * 2048, (b & 0x3fff) * 16, adds});
}
static void wgmma_of_registers(float (&d)[32], const u32 (&a)[4], u32 b, bool adds) {
    multiply_64({d, a, 0, (b & 0x3fff) * 16, adds});
}
"""
WORDS_7_5 = r"""
static void store_16(u32 to, uint4 v) { memcpy(block_memory + to, &v, 16); }
static u32 add_shared(u32 at, u32 n) { u32& word = *(u32*)(block_memory + at); return (word += n) - n; }
static u32 read_shared(u32 at) { wait_for_others(); return *(u32*)(block_memory + at); }
static void write_shared(u32 at, u32 v) { *(u32*)(block_memory + at) = v; }
static void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
    const u32 a[2] = {a0, a1};
    multiply_fragments<u16, u16, float, 8>(a, &b, c, c, from_half, from_half);
}
"""
PRODUCT_7_5 = r"""
#if MINS
typedef unsigned char Code;
#else
typedef signed char Code;
#endif
static float of_code(Code code) { return code; }
static void mma_8x8(int& c0, int& c1, u32 a, u32 b) {
    const u32 rows[2] = {a, 0};
    int c[4] = {c0, c1, 0, 0};
    multiply_fragments<Code, signed char, int, 16>(rows, &b, c, c, of_code, of_int8);
    c0 = c[0], c1 = c[1];
}
"""


def without(code: str, names: list[str]) -> str:
    """The code without its device functions `names`."""
    for name in names:
        while found := re.search(r"__device__ __forceinline__ [\w ]+ " + name + r"\(", code):
            at = _closing(code, found.end() - 1, "()")
            code = code[: found.start()] + code[_closing(code, code.index("{", at), "{}") + 1 :]
    return code


def _closing(code: str, at: int, pair: str) -> int:
    depth = 0
    while True:
        depth += (code[at] == pair[0]) - (code[at] == pair[1])
        if not depth:
            return at
        at += 1


def for_the_cpu(code: str, kernels: dict[str, tuple[str, ...]]) -> str:
    if TURING:
        ours = {"store_16": WORDS_7_5, "mma_8x8": PRODUCT_7_5, "ldmatrix": LOADS}
    else:
        products = PRODUCT if "mma_bf16(" in code else FLOAT16
        ours = {
            "barrier_init": RING,
            "mma": products,
            "copy16": COPIES,
            "ldmatrix": LOADS,
            "wgmma": HOPPER,
            "wgmma_64": HOPPER_64,
        }
    replaced = IN_SIMT + re.findall(r"^static \w+ (\w+)\(", "".join(ours.values()), re.MULTILINE)
    for name, text in ours.items():  # stands before the function of that name, which it replaces with others
        code = text.join(re.split(rf"^(?=__device__ __forceinline__ void {name}\()", code, flags=re.MULTILINE))
    code = without(code, replaced)
    code = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)block_memory;", code)
    skipped = r"cp\.async\.wait_|wgmma\.(?:fence|commit|wait)|fence\.proxy|setmaxnreg"  # all is done at once
    code = re.sub(rf'asm volatile\("(?:{skipped})[^"]*"[^;]*;', "", code)
    code = re.sub(r"__align__\((\d+)\)", r"alignas(\1)", code)
    code = f"namespace {{\n{code}\n}}\n"  # GCC puts shared variables of functions with external names elsewhere
    for name, params in kernels.items():
        types = [re.sub(r"\w+$", "", p).strip() for p in params]
        for written, param in zip(types, params, strict=True):
            code += f"static_assert(sizeof({written}) == {type_of(param).itemsize});\n"
        args = ", ".join(f"*({t}*)arguments_{name}[{i}]" for i, t in enumerate(types))
        code += f"""
static void** arguments_{name};
static void call_{name}() {{ {name}({args}); }}
extern "C" const char* run_{name}(void** arguments, unsigned* grid, unsigned* block) {{
    arguments_{name} = arguments;
    return run_grid(call_{name}, grid, block);
}}
"""
    return code


class Program:
    """NVRTC's, whose "cubin" is what it was given."""

    def __init__(self, code: str, *_: object):
        self.code = code

    def compile(self, options: tuple[str, ...]) -> None:
        self.cubin = json.dumps((self.code, options)).encode()


class RawModule:
    def __init__(self, code: str = "", options: tuple[str, ...] = (), path: str = ""):
        if path:
            code, options = json.loads(Path(path).read_text())
        self.kernels = prototypes(code)
        text = for_the_cpu(code, self.kernels)
        defines = tuple(option.removeprefix("-D") for option in options if option.startswith("-D"))
        defines += (f"__CUDA_ARCH__={CAPABILITY}0",)
        flags = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-ffp-contract=off", "-mfma", "-mf16c"]
        if "BIMETAL_RACES" in os.environ:
            flags += ["-fsanitize=thread", "-g1"]
        build.engine()  # first: the kernels' library takes its symbols
        self.text, self.library = text, ctypes.CDLL(str(build.library(text, flags, SIMT.read_text(), defines)))

    def compile(self) -> None:
        pass

    def get_function(self, name: str) -> "Function":
        return Function(name, self.kernels[name], self.library, self.text)


class Function:
    def __init__(self, name: str, params: tuple[str, ...], library: ctypes.CDLL, text: str):
        self.name, self.kernel, self.device, self.ptr = name, self, current(), next(numbers)
        self.types = [type_of(param) for param in params]
        self.offsets = [0]
        for dtype in self.types:
            self.offsets[-1] += -self.offsets[-1] % dtype.alignment
            self.offsets.append(self.offsets[-1] + dtype.itemsize)
        self.run = getattr(library, f"run_{name}")
        self.run.restype = ctypes.c_char_p
        self.wrote_beyond, self.waited = library.wrote_beyond, library.waited
        self.located = partial(build.located, library=library._name, text=text)
        self.max_dynamic_shared_size_bytes = 46 << 10  # of 48 KB, less what kernels declare themselves
        functions[self.ptr] = self

    def launch(self, grid: tuple, block: tuple, packed: bytes, shared_mem: int, stream: "Stream") -> None:
        if len(packed) != self.offsets[-1]:
            raise TypeError(f"{self.name} takes {self.offsets[-1]} bytes of arguments, got {len(packed)}")
        if not all((*grid, *block)):
            raise ValueError(f"{self.name} has the grid {grid} of blocks {block}")
        places = zip(self.offsets, self.types, strict=False)
        values = [np.frombuffer(packed, dtype, 1, offset)[0] for offset, dtype in places]
        belongs(self.name, self.device, stream.device)
        for value in values if COUNT > 1 else ():
            if "peer0" in (value.dtype.names or ()):
                reaches(self.name, [device_of(int(value[field])) for field in value.dtype.names])
                continue
            words = [value[field] for field in value.dtype.names or ()] or [value]
            addresses = [int(word) for word in words if word.dtype == np.uint64]
            belongs(f"an argument of {self.name}", *map(device_of, addresses))
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise ValueError(f"{self.name} needs {shared_mem} bytes of shared memory, which were not allowed")
        held = ctypes.create_string_buffer(packed)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(held) + offset for offset in self.offsets[:-1]))
        sizes = [(ctypes.c_uint * 3)(*each) for each in (grid, block)]

        again = [False]

        def launch(held: Any = held) -> None:  # keeps what the pointers point to
            with running:
                self.waited(lost_peers[0], again[0])
                error = self.run(pointers, *sizes)
                beyond = not error and "BIMETAL_RACES" not in os.environ and self.wrote_beyond(shared_mem)
            if error:
                raise RuntimeError(f"{self.name}: {self.located(error.decode())}")
            if beyond:
                raise RuntimeError(
                    f"{self.name} writes beyond the {shared_mem} bytes of shared memory that it was given"
                )
            again[0] = bool(self.waited(0, 0)) and not lost_peers[0]
            if again[0]:
                raise WaitsForPeer

        if stream.recording is None:
            stream.runs(1)
            submit(self.device, launch)
        else:
            stream.recording.append(launch)


def launch_kernel(function: int, *rest: int) -> None:
    """Launch as cuLaunchKernel does, with the arguments in a buffer that `extra` describes."""
    dims, (shared_mem, stream, params, extra) = rest[:6], rest[6:]
    one, address, two, size, end = (ctypes.c_size_t * 5).from_address(extra)
    if (params, one, two, end) != (0, 1, 2, 0):
        raise ValueError(f"a launch has the arguments {params}, and {one}, {two}, {end} beside its buffer's")
    packed = ctypes.string_at(address, ctypes.c_size_t.from_address(size).value)
    functions[function].launch(dims[:3], dims[3:], packed, shared_mem, streams[stream])


COUNT = int(os.environ.get("BIMETAL_GPUS", "1"))
functions: WeakValueDictionary[int, "Function"] = WeakValueDictionary()  # by the number that stands for their address
here = threading.local()  # of each thread: `device`, the GPU that its calls go to
running = threading.Lock()  # the engine runs one kernel at a time
numbers = itertools.count(1)  # of streams
clock = SimpleNamespace(host=0, busy=[0] * COUNT)  # the host's time, and for how long each GPU has run kernels
limits = [0] * COUNT  # bytes of memory that each GPU gives; 0: all
memories: list[list[tuple[int, int]]] = [[] for _ in range(COUNT)]  # of each GPU, where its memory begins and ends


reached: set[tuple[int, int]] = set()  # (GPU, other): whose memory it may reach
queues: list[deque[Callable[[], Any]]] = [deque() for _ in range(COUNT)]  # of each GPU, after a kernel that waits
freed: list[np.ndarray] = []  # memory that what is queued may use
queueing = threading.RLock()
lost_peers = [False]  # whether kernels are told that nobody will go on


class WaitsForPeer(Exception):  # noqa: N818
    """A kernel needs what another GPU has not sent yet."""


def submit(device: int, work: Callable[[], Any]) -> None:
    """Run `work`, or queue it after a kernel of its GPU that waits; and what other GPUs can do then."""
    if COUNT == 1:
        work()
        return
    with queueing:
        queues[device].append(work)
        while any([run(queue) for queue in queues]):
            pass
        if not any(queues):
            freed.clear()


def run(queue: deque[Callable[[], Any]]) -> bool:
    """Run what is queued on a GPU until a kernel waits; whether anything ran."""
    ran = False
    while queue:
        try:
            queue[0]()
        except WaitsForPeer:
            break
        except BaseException:
            queue.clear()
            raise
        queue.popleft()
        ran = True
    return ran


def finish(device: int) -> None:
    """Run what is queued on a GPU, for the host waits for it: nobody will go on."""
    with queueing:
        while queues[device]:
            lost_peers[0] = True
            try:
                queues[device].popleft()()
            finally:
                lost_peers[0] = False


def current() -> int:
    return getattr(here, "device", 0)


def reaches(what: str, devices: list[int | None]) -> None:
    """Refuse memory of GPUs that the current one may not reach."""
    for device in devices:
        if device not in (None, current()) and (current(), device) not in reached:
            raise RuntimeError(f"{what} is handed memory of GPU {device}, which GPU {current()} does not reach")


def device_of(address: int) -> int | None:
    """The GPU whose memory holds an address, or None if no GPU holds it."""
    for device, spans in enumerate(memories):
        at = bisect.bisect_right(spans, (address, sys.maxsize)) - 1
        if at >= 0 and address < spans[at][1]:
            return device
    return None


def belongs(what: str, *devices: int | None) -> None:
    """Refuse memory on another GPU than the current one."""
    for device in devices:
        if device not in (None, current()):
            raise RuntimeError(f"{what} is of GPU {device}, and GPU {current()} is current")


class Device:
    def __init__(self, index: int):
        self.index, self.before = index, []

    def use(self) -> None:
        here.device = self.index

    def __enter__(self) -> "Device":
        self.before.append(current())
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        here.device = self.before.pop()


class Memory:
    def __init__(self, nbytes: int):
        self.bytes = np.full(nbytes + 512, 0xFF, np.uint8)  # NaN where nobody writes
        self.ptr = -(-self.bytes.ctypes.data // 256) * 256
        self.device, self.span = current(), (self.ptr, self.ptr + nbytes)
        bisect.insort(memories[self.device], self.span)

    def __del__(self) -> None:
        memories[self.device].remove(self.span)
        if any(queues):
            freed.append(self.bytes)


def alloc(nbytes: int) -> Memory:
    if 0 < limits[current()] < held() + nbytes:
        raise MemoryError
    return Memory(nbytes)


class Capture(list[Callable[[], None]]):
    """The launches of a graph, recorded while it is captured and replayed later."""

    ended = False


streams: WeakValueDictionary[int, "Stream"] = WeakValueDictionary()
entered: list["Stream"] = []  # by `with`, the last one is CuPy's current stream


class Stream:
    def __init__(self, non_blocking: bool = False):
        self.device, self.ptr, self.time = current(), next(numbers), 0
        self.captures: Capture | None = None
        streams[self.ptr] = self

    @property
    def recording(self) -> Capture | None:
        """The graph that takes this stream's launches, if it is being captured."""
        return None if self.captures is None or self.captures.ended else self.captures

    def __enter__(self) -> "Stream":
        belongs("a stream", self.device)
        entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        entered.pop()

    def runs(self, kernels: int) -> None:
        """Let time pass on this stream."""
        self.time = max(self.time, clock.host) + kernels
        clock.busy[self.device] += kernels

    @property
    def done(self) -> bool:
        return not queues[self.device]

    def synchronize(self) -> None:
        finish(self.device)
        clock.host = max(clock.host, self.time)

    def wait_event(self, event: "Event") -> None:
        finish(event.device)
        self.time = max(self.time, event.time)
        if event.recording is not None and not event.recording.ended:
            self.captures = event.recording
        elif self.recording is not None:
            raise RuntimeError("a stream that is captured waits for an event outside of its graph")

    def begin_capture(self) -> None:
        belongs("a stream", self.device)
        if self.recording is not None:
            raise RuntimeError("a stream is captured twice at once")
        self.captures = Capture()

    def end_capture(self) -> SimpleNamespace:
        belongs("a stream", self.device)
        launches = self.captures
        assert launches is not None
        launches.ended = True

        def launch(stream: Stream) -> None:
            belongs("a stream of a graph", self.device, stream.device)
            stream.runs(len(launches))
            for each in launches:
                submit(self.device, each)

        return SimpleNamespace(launch=launch)


class Event:
    def __init__(self, disable_timing: bool = False):
        self.device, self.recording, self.done, self.seconds, self.time = current(), None, True, 0.0, 0

    def record(self, stream: Stream) -> None:
        belongs("an event", self.device, stream.device)
        self.recording, self.seconds = stream.recording, time.perf_counter()
        self.time = max(stream.time, clock.host)

    def synchronize(self) -> None:
        finish(self.device)
        clock.host = max(clock.host, self.time)


def gemm(*args: Any) -> None:
    launch_product(partial(multiply, *args))


def batched_gemm(*args: Any) -> None:
    launch_product(partial(multiply_each, *args))


def launch_product(work: Any) -> None:
    recording = entered[-1].recording if entered else None
    if recording is None:
        submit(current(), work)
    else:
        recording.append(work)


def multiply(*args: Any) -> None:
    """cublasGemmEx as cuda_backend/gemm.py calls it, row by row: C (n, m) = B (n, k) op(A), op(A) being (k, m)."""
    _, transposed, _, m, n, k, _, a, type_, lda, b, _, ldb, _, c, out_type, ldc, _, _ = args

    def values(address: int, rows: int, columns: int, stride: int) -> np.ndarray:
        count = (rows - 1) * stride + columns
        bits = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(address))
        padded = np.resize(bits, rows * stride).reshape(rows, stride)[:, :columns]
        return (
            (padded.astype(np.uint32) << 16).view(np.float32) if type_ == 14 else padded.view(np.float16).astype("f4")
        )

    matrix = values(a, m, k, lda).T if transposed else values(a, k, m, lda)
    kind = np.float16 if out_type == 2 else np.float32
    size = np.dtype(kind).itemsize
    for i, row in enumerate(values(b, n, k, ldb) @ matrix):
        held = row.astype(kind)
        ctypes.memmove(c + i * ldc * size, held.ctypes.data, held.nbytes)


def multiply_each(*args: Any) -> None:
    """cublasGemmStridedBatchedEx of 16-bit matrices, as cuda_backend/gemm.py calls it."""
    *head, a, a_type, lda, a_stride, b, b_type, ldb, b_stride, zero, c, c_type, ldc, c_stride, count, kind, how = args
    for i in range(count):
        at = [address + 2 * i * stride for address, stride in ((a, a_stride), (b, b_stride), (c, c_stride))]
        multiply(*head, at[0], a_type, lda, at[1], b_type, ldb, zero, at[2], c_type, ldc, kind, how)


PROPERTIES = {
    "name": b"a CPU",
    "major": 7 if TURING else 8,
    "minor": 5 if TURING else 9,
    "multiProcessorCount": 4,
    "sharedMemPerMultiprocessor": (64 if TURING else 228) << 10,
    "sharedMemPerBlockOptin": (64 if TURING else 227) << 10,
}


def copy(to: int, source: int, n: int, kind: int, stream: int) -> None:
    belongs("a stream", streams[stream].device)
    belongs("copied memory", device_of(int(to)), device_of(int(source)))
    if streams[stream].recording is not None:
        raise RuntimeError("a copy in a graph is not played here")
    device = streams[stream].device
    if kind == runtime.memcpyDeviceToHost:
        finish(device)
    elif queues[device] and kind == runtime.memcpyHostToDevice:  # read before the call returns
        held = ctypes.string_at(int(source), int(n))
        return submit(device, partial(ctypes.memmove, int(to), held, int(n)))
    return submit(device, partial(ctypes.memmove, int(to), int(source), int(n)))


def copy_between(to: int, device: int, source: int, other: int, n: int, stream: int) -> None:
    belongs("a stream", streams[stream].device)
    if (device_of(to), device_of(source)) != (device, other) or streams[stream].recording is not None:
        raise RuntimeError(f"a copy of {n} bytes from GPU {other} to {device} names others' memory, or is in a graph")
    finish(device)
    finish(other)
    ctypes.memmove(to, source, n)


def fill(to: int, value: int, n: int, stream: int) -> None:
    belongs("filled memory", device_of(int(to)), streams[stream].device)
    submit(streams[stream].device, partial(ctypes.memset, int(to), value, int(n)))


class AllGather:
    """One ncclAllGather of several GPUs of this process, which each run it as often as the others.

    sent  by run and GPU
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []  # (device, address of its part, of all parts, bytes)
        self.runs: dict[int, int] = {}
        self.sent: dict[int, dict[int, bytes]] = {}

    def run(self, device: int, address: int, to: int, nbytes: int) -> None:
        number = self.runs.get(device, 0)
        sent = self.sent.setdefault(number, {})
        sent[device] = ctypes.string_at(address, nbytes)
        if len(sent) < len(self.calls):
            if lost_peers[0]:
                raise RuntimeError(f"GPU {device} waits for a part of another GPU for ever")
            raise WaitsForPeer
        for place, (other, *_) in enumerate(self.calls):
            ctypes.memmove(to + place * nbytes, sent[other], nbytes)
        self.runs[device] = number + 1


grouped: list[tuple[Any, Stream, tuple[int, int, int, int]]] | None = None  # calls since groupStart


class AllGatherOfProcesses:
    """One ncclAllGather of a GPU with those of other processes, whose parts go through rank 0."""

    def __init__(self, communicator: "NcclCommunicator"):
        self.communicator = communicator
        self.calls: list[tuple[int, int, int, int]] = []

    def run(self, device: int, address: int, to: int, nbytes: int) -> None:
        own, ranks = ctypes.string_at(address, nbytes), self.communicator
        try:
            parts = [own, *(receive(peer) for peer in ranks.peers)] if ranks.rank == 0 else []
            if ranks.rank:
                send(ranks.peers[0], own)
            whole = b"".join(parts) if parts else receive(ranks.peers[0])
            for peer in ranks.peers if parts else ():
                send(peer, whole)
        except OSError:  # a lost rank's part never comes
            ranks.aborted.wait()
            return
        if len(whole) != ranks.count * nbytes:
            raise RuntimeError(f"ranks gather {nbytes} bytes here, and together {len(whole)}")
        ctypes.memmove(to, whole, len(whole))


def send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(len(data).to_bytes(4, "big") + data)


def receive(peer: socket.socket) -> bytes:
    data, size = b"", 4
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
        if size == 4 == len(data):
            size += int.from_bytes(data, "big")
    return data[4:]


servers: dict[int, socket.socket] = {}  # of ids that this process has made, by their ports


def get_unique_id() -> bytes:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    servers[port] = server
    return bytes([port // 256, port % 256, *[128] * 126])


class NcclCommunicator:
    def __init__(self, count: int, id: bytes, rank: int):
        if not isinstance(id, bytes) or len(id) != 128 or not 0 <= rank < count:
            raise nccl.NcclError(f"rank {rank} of {count}, by an id of {len(id)}")
        self.device, self.count, self.rank, self.aborted = current(), count, rank, threading.Event()
        port = id[0] * 256 + id[1]
        if rank == 0:
            found = {}
            for _ in range(count - 1):
                peer, _ = servers[port].accept()
                found[receive(peer)[0]] = peer
            self.peers = [found[other] for other in range(1, count)]
        else:
            self.peers = [socket.create_connection(("127.0.0.1", port))]
            send(self.peers[0], bytes([rank]))

    @staticmethod
    def initAll(devices: list[int]) -> "list[NcclCommunicator]":  # noqa: N802
        found = []
        for device in devices:
            found.append(NcclCommunicator.__new__(NcclCommunicator))
            found[-1].device, found[-1].peers = device, []
        return found

    def abort(self) -> None:
        self.aborted.set()
        for peer in self.peers:
            peer.close()

    def allGather(self, address: int, to: int, count: int, kind: int, stream: int) -> None:  # noqa: N802
        if grouped is None or kind != nccl.NCCL_FLOAT32:
            raise nccl.NcclError("a call outside of a group, or of other numbers than float32")
        on = {streams[stream].device, device_of(address), device_of(to)}
        if on != {self.device}:
            raise RuntimeError(f"a communicator of GPU {self.device} is handed a stream or memory of {on}")
        shared = grouped[0][0] if grouped else AllGather()
        together = AllGatherOfProcesses(self) if self.peers else shared
        call = self.device, address, to, 4 * count
        together.calls.append(call)
        grouped.append((together, streams[stream], call))

    def check_async_error(self) -> None:
        pass


def group_start() -> None:
    global grouped
    grouped = []


def group_end() -> None:
    """Let each GPU run its call of the group, at its place in its stream or graph."""
    global grouped
    assert grouped is not None
    calls, grouped = grouped, None
    for together, stream, call in calls:
        work = partial(together.run, *call)
        if stream.recording is None:
            submit(call[0], work)
        else:
            stream.recording.append(work)


nccl = ModuleType("cupy.cuda.nccl")
nccl.__dict__.update(
    available=True,
    NCCL_FLOAT32=7,
    NcclCommunicator=NcclCommunicator,
    NcclError=type("NcclError", (RuntimeError,), {}),
    get_unique_id=get_unique_id,
    get_version=lambda: 22703,
    groupStart=group_start,
    groupEnd=group_end,
)
sys.modules["cupy.cuda.nccl"] = nccl


pinned: dict[int, np.ndarray] = {}


def host_memory(nbytes: int, flags: int) -> int:
    memory = np.full(nbytes + 256, 0xFF, np.uint8)
    address = -(-memory.ctypes.data // 256) * 256
    pinned[address] = memory
    return address


def held() -> int:
    return sum(end - start for start, end in memories[current()])


runtime = SimpleNamespace(
    CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyDeviceToDevice=3,
    memGetInfo=lambda: (10**9, 10**9),
    getDeviceCount=lambda: COUNT,
    driverGetVersion=lambda: 13000,
    runtimeGetVersion=lambda: 13000,
    getDevice=current,
    getDeviceProperties=lambda device: PROPERTIES,
    deviceCanAccessPeer=lambda device, other: device != other,
    deviceEnablePeerAccess=lambda other: reached.add((current(), other)),
    memcpyAsync=copy,
    memcpyPeerAsync=copy_between,
    hostAlloc=host_memory,
    freeHost=lambda address: pinned.pop(address),
    memsetAsync=fill,
)
cuda = ModuleType("cupy.cuda")
cuda.__dict__.update(
    alloc=alloc,
    alloc_pinned_memory=bytearray,
    PinnedMemoryPointer=bytearray,
    PinnedMemoryPool=lambda: SimpleNamespace(malloc=bytearray),
    set_allocator=lambda allocator: None,
    Device=Device,
    Event=Event,
    Stream=Stream,
    runtime=runtime,
    memory=SimpleNamespace(OutOfMemoryError=MemoryError),
    compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
    nccl=nccl,
    nvrtc=SimpleNamespace(
        getVersion=lambda: (13, 0),
        NVRTCError=type("NVRTCError", (Exception,), {}),
        createProgram=Program,
        compileProgram=Program.compile,
        getCUBIN=lambda program: program.cubin,
        getProgramLog=lambda program: "",
        destroyProgram=lambda program: None,
    ),
    device=SimpleNamespace(get_cublas_handle=lambda: 0),
    cublas=SimpleNamespace(gemmEx=gemm, gemmStridedBatchedEx=batched_gemm),
    driver=SimpleNamespace(launchKernel=launch_kernel),
    get_elapsed_time=lambda begun, done: 1e3 * (done.seconds - begun.seconds),
)
sys.modules["cupy.cuda"] = cuda


def get_default_memory_pool() -> SimpleNamespace:
    return SimpleNamespace(
        total_bytes=held, used_bytes=held, free_all_blocks=lambda: None, get_limit=get_limit, set_limit=set_limit
    )


def get_limit() -> int:
    return limits[current()]


def set_limit(size: int) -> None:
    limits[current()] = size


def get_default_pinned_memory_pool() -> SimpleNamespace:
    return SimpleNamespace(free_all_blocks=lambda: None)
