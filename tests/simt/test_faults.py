"""Kernels with one fault each: every detector fires, with its own message."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
metal = pytest.importorskip("simt.metal", exc_type=ImportError)
HEAD = "uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;\n"
TILE = HEAD + "threadgroup float tile[64];\n"


@dataclass(frozen=True)
class Kernel:
    """A kernel of 64 threads in one group that reads x, (64,) of ones, and writes out, (64,)."""

    body: str
    header: str = ""
    x: Any = field(default_factory=lambda: mx.ones(64))
    others: dict[str, Any] = field(default_factory=dict)
    out: Any = mx.float32
    size: int = 64
    threads: int = 64
    group: int = 64
    options: dict[str, Any] = field(default_factory=dict)  # of metal_kernel
    call: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Any:
        kernel = metal.metal_kernel(
            "planted", ["x", *self.others], ["out"], self.body, header=self.header, **self.options
        )
        return kernel(
            inputs=[self.x, *self.others.values()],
            output_shapes=[(self.size,)],
            output_dtypes=[self.out],
            grid=(self.threads, 1, 1),
            threadgroup=(self.group, 1, 1),
            **self.call,
        )[0]


MATRIX = TILE + "simdgroup_float8x8 a, b, sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);\n"
N = list(range(64))
X = mx.arange(64.0)
SQUARE = np.arange(64).reshape(8, 8)
SOUND = {  # and what it gives
    "barrier": (
        Kernel(TILE + "tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[63 - i];", x=X),
        N[::-1],
    ),
    "SIMD barrier": (
        Kernel(TILE + "tile[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[i ^ 1];", x=X),
        [n ^ 1 for n in N],
    ),
    "device barrier": (
        Kernel(
            HEAD + "out[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nfloat y = out[i ^ 32];\n"
            "threadgroup_barrier(mem_flags::mem_device);\nout[i] = y;",
            x=X,
        ),
        [n ^ 32 for n in N],
    ),
    "partial group": (
        Kernel(HEAD + "out[i] = simd_sum(x[i]);", x=mx.ones(70), size=70, threads=70),
        [32] * 64 + [6] * 6,
    ),
    "whole SIMD groups return": (
        Kernel(HEAD + "if (i >= 32) { out[i] = 0; return; } out[i] = simd_sum(x[i]);"),
        [32] * 32 + [0] * 32,
    ),
    "tiny input, helper for any space": (
        Kernel(HEAD + "out[i] = last(x);", "template <typename P> float last(P p) { return p[3]; }\n", x=X[:4]),
        [3] * 64,
    ),
    "atomic": (
        Kernel(
            HEAD + "atomic_fetch_add_explicit(&out[0], x[i], memory_order_relaxed);",
            size=1,
            options={"atomic_outputs": True},
            call={"init_value": 5},
        ),
        [69],
    ),
    "strides": (
        Kernel(
            HEAD + "out[i] = x[i * x_strides[0]];", x=mx.arange(128.0)[::2], options={"ensure_row_contiguous": False}
        ),
        [2 * n for n in N],
    ),
    "matrices": (  # x @ x.T + 1, times 2: from device and threadgroup memory, transposed, and a diagonal one
        Kernel(
            MATRIX + "tile[i] = x[i]; tile[i + 32] = x[i + 32]; simdgroup_load(a, x);\n"
            "simdgroup_barrier(mem_flags::mem_threadgroup);\nsimdgroup_load(b, tile, 8, ulong2(0), true);\n"
            "simdgroup_multiply_accumulate(sum, a, b, sum);\nsimdgroup_float8x8 two(2.0f);\n"
            "simdgroup_multiply(b, sum, two); simdgroup_store(b, out);",
            x=X,
            threads=32,
        ),
        (2 * (SQUARE @ SQUARE.T + 1)).ravel().tolist(),
    ),
    "a lane's elements of a matrix": (  # of 64 threads that hold one matrix per SIMD group
        Kernel(
            HEAD + "uint row = lane / 16 * 4 + lane / 2 % 4, column = lane / 8 % 2 * 4 + lane % 2 * 2;\n"
            "simdgroup_half8x8 a;\na.thread_elements()[0] = half(x[8 * row + column]);\n"
            "a.thread_elements()[1] = half(x[8 * row + column + 1]);\n"
            "if (i < 32) simdgroup_store(a, out, 8, ulong2(0), true);",
            x=X,
            out=mx.float16,
        ),
        SQUARE.T.ravel().tolist(),
    ),
    "the same value by all": (Kernel(HEAD + "out[i / 2] = 3;", size=32), [3] * 32),
    "unsuffixed literal": (Kernel(HEAD + "out[i] = 0.1 * x[i];"), [float(np.float32(0.1))] * 64),
    "template": (
        Kernel(HEAD + "out[i] = T(x[i] * N);", x=X, out=mx.bfloat16, call={"template": [("T", mx.bfloat16), ("N", 3)]}),
        [3 * n for n in N],
    ),
}

RUN_FAULTS = {
    # ---- races
    "no barrier, then a read": ("race: .* reads byte 0 of", Kernel(TILE + "tile[i] = x[i]; out[i] = tile[i / 2];")),
    "no barrier before the next round": (
        "race: .* threadgroup memory",
        Kernel(
            TILE + "float sum = 0;\nfor (int r = 0; r < 2; r++) {\n  tile[i] = x[i] + r;\n"
            "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  sum += tile[63 - i];\n}\nout[i] = sum;"
        ),
    ),
    "a barrier that orders nothing": (
        "race: .* reads byte",
        Kernel(TILE + "tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); out[i] = tile[i / 2];"),
    ),
    "a device barrier for threadgroup memory": (
        "race: .* reads byte",
        Kernel(TILE + "tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); out[i] = tile[i / 2];"),
    ),
    "a threadgroup barrier for device memory": (
        r"race: .* reads out\[31\]",
        Kernel(
            HEAD + "out[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);\nif (out[i / 2] > 2) out[i] = 2;"
        ),
    ),
    "a SIMD barrier between SIMD groups": (
        "race: .* reads byte 0 of",
        Kernel(
            TILE + "tile[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[i < 32 ? i : 63 - i];"
        ),
    ),
    "no SIMD barrier inside a SIMD group": (
        "race: .* reads byte .* of threadgroup",
        Kernel(TILE + "tile[i] = x[i]; float a = simd_sum(1.0f); out[i] = tile[i & ~1u] + a;"),
    ),
    "two groups write one place": (r"race: .* writes out\[0\]", Kernel(HEAD + "out[lane] = i;", size=32, group=32)),
    "a sum without atomics": (
        r"race: .* out\[0\]",
        Kernel(HEAD + "out[0] += x[i];", size=1, call={"init_value": 0}),
    ),
    "a plain read of an atomic": (
        r"race: .* changes out\[0\] at line 7, which thread 0 read",
        Kernel(
            HEAD + "atomic_fetch_add_explicit(&out[0], x[i], memory_order_relaxed); float y = *(device float*)&out[0];"
            " if (y > 100) atomic_fetch_add_explicit(&out[0], y, memory_order_relaxed);",
            size=1,
            options={"atomic_outputs": True},
            call={"init_value": 0},
        ),
    ),
    "a read of another group's output": (
        r"race: .* of group \(1, 0, 0\) reads out\[0\] .* of group number 0 wrote",
        Kernel(HEAD + "out[i] = x[i]; if (i >= 32) out[i] = out[i - 32] + 1;", group=32),
    ),
    "a place by order of arrival": (
        "out differs between the orders forward and reverse",
        Kernel(
            HEAD + "threadgroup atomic_uint arrived;\n"
            "if (i == 0) atomic_store_explicit(&arrived, 0, memory_order_relaxed);\n"
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
            "out[atomic_fetch_add_explicit(&arrived, 1, memory_order_relaxed)] = i;"
        ),
    ),
    # ---- divergence
    "a barrier for half of the group": (
        "divergence: .* returns while others wait in threadgroup_barrier",
        Kernel(HEAD + "if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = x[i];"),
    ),
    "a return before a barrier": (
        "divergence: .* threadgroup_barrier at line .* has returned",
        Kernel(HEAD + "out[i] = x[i]; if (i < 5) return; threadgroup_barrier(mem_flags::mem_threadgroup);"),
    ),
    "one barrier in each branch": (
        "divergence: .* is in threadgroup_barrier at line 9 while others wait in threadgroup_barrier at line 8",
        Kernel(
            HEAD + "out[i] = x[i];\nif (i < 32) threadgroup_barrier(mem_flags::mem_device);\n"
            "else threadgroup_barrier(mem_flags::mem_device);"
        ),
    ),
    "a shuffle by half of the lanes": (
        "divergence: .* simd_shuffle_xor",
        Kernel(HEAD + "float v = x[i]; if (lane < 16) v = simd_shuffle_xor(v, 1); out[i] = v;"),
    ),
    "a reduction after some lanes returned": (
        r"divergence: thread \(3, 0, 0\) .* returns while lanes of its SIMD group wait in simd_sum",
        Kernel(HEAD + "out[i] = x[i]; if (lane == 3) return; float s = simd_sum(x[i]); if (s > 99) out[i] = s;"),
    ),
    "a reduction in a loop of the lane's own length": (
        "divergence: .* returns while lanes of its SIMD group wait in simd_sum",
        Kernel(HEAD + "float v = 1; for (uint k = 31; k > lane; k--) v = simd_sum(v); out[i] = v;"),
    ),
    "different collectives at once": (
        "divergence: .* is in simd_min .* wait in simd_max",
        Kernel(HEAD + "float v = x[i]; out[i] = lane & 1 ? simd_min(v) : simd_max(v);"),
    ),
    "a collective beside a barrier": (
        "divergence: .* waits in simd_sum .* while .* waits in threadgroup_barrier",
        Kernel(
            HEAD + "out[i] = x[i]; if (lane & 1) threadgroup_barrier(mem_flags::mem_device);"
            " else if (simd_sum(1.0f) > 99) out[i] = 0;"
        ),
    ),
    "a shuffle from a lane that a partial group lacks": (
        "simd_shuffle_xor at line .* reads lane 15, which the group does not have",
        Kernel(HEAD + "out[i] = simd_shuffle_xor(x[i], 8);", size=8, threads=8),
    ),
    "a wait for another group": (
        "endless: .* still runs",
        Kernel(
            HEAD + "if (i == 0) while (atomic_load_explicit(&out[1], memory_order_relaxed) < 1) {}"
            " atomic_store_explicit(&out[i / 32], 1, memory_order_relaxed);",
            size=2,
            group=32,
            options={"atomic_outputs": True},
            call={"init_value": 0},
        ),
    ),
    "an endless loop": ("endless: .* still runs", Kernel(HEAD + "uint n = i + 1; while (n) { n |= 1; out[i] = n; }")),
    # ---- matrices of a SIMD group
    "a matrix of threadgroup memory before the barrier": (
        "uninitialised: .* reads byte .* of threadgroup memory, which nobody wrote, at line 10",
        Kernel(MATRIX + "tile[i] = x[i];\nsimdgroup_load(a, tile);\nif (i < 32) simdgroup_store(a, out);"),
    ),
    "a matrix overwritten while another SIMD group may read it": (
        "race: .* writes byte .* of threadgroup memory at line 12, which thread .* read at line 11",
        Kernel(
            MATRIX + "tile[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nsimdgroup_load(a, tile);\n"
            "tile[i] = 0;\nif (i < 32) simdgroup_store(a, out);"
        ),
    ),
    "a product by half of the lanes": (
        "divergence: .* simdgroup_multiply_accumulate",
        Kernel(
            MATRIX + "simdgroup_load(a, x); if (lane < 16) simdgroup_multiply_accumulate(sum, a, a, sum);"
            " simdgroup_store(sum, out);"
        ),
    ),
    "a product by a group that is not full": (
        "simdgroup_multiply_accumulate at line 9 by a group without lane 24",
        Kernel(MATRIX + "simdgroup_multiply_accumulate(sum, sum, sum, sum);\nout[i] = 1;", size=24, threads=24),
    ),
    "a matrix that nobody filled": (
        "uninitialised: lane 0 has filled a matrix of line 9 in part or not at all",
        Kernel(MATRIX + "simdgroup_multiply_accumulate(sum, a, sum, sum); simdgroup_store(sum, out);", threads=32),
    ),
    "a matrix half filled": (
        "uninitialised: lane 0 has filled a matrix of line 9 in part or not at all",
        Kernel(
            MATRIX + "a.thread_elements()[1] = 1; simdgroup_multiply_accumulate(sum, sum, a, sum);"
            " simdgroup_store(sum, out);",
            threads=32,
        ),
    ),
    "a matrix per lane": (
        "simdgroup_load at line 9: lane 1 names another matrix than lane 0",
        Kernel(MATRIX + "simdgroup_load(a, x + lane); simdgroup_store(a, out);", threads=32),
    ),
    "a matrix past the end": (
        r"out of bounds: .* reads x\[6[4-9]\] of 64 elements, at line 9",
        Kernel(MATRIX + "simdgroup_load(a, x + 1); simdgroup_store(a, out);", threads=32),
    ),
    "two SIMD groups that store one matrix": (
        r"race: .* writes out\[.*\] at line 9, which thread",
        Kernel(MATRIX + "sum.thread_elements()[0] = i; simdgroup_store(sum, out);"),
    ),
    # ---- memory
    "a write past the end": (
        r"out of bounds: thread \(63, 0, 0\) .* writes out\[64\] of 64",
        Kernel(HEAD + "out[i] = x[i]; out[i + 1] = x[i];"),
    ),
    "a read past the end": (r"out of bounds: .* reads x\[64\] of 64", Kernel(HEAD + "out[i] = x[i + 1];")),
    "a read before the start": (r"out of bounds: .* reads x\[-1\] of 64", Kernel(HEAD + "out[i] = x[int(i) - 1];")),
    "a vector read over the end": (
        r"out of bounds: .* reads x\[6[23]\] of 62",
        Kernel(HEAD + "out[i] = dot(((const device float4*)x)[i / 4], float4(1));", x=mx.ones(62)),
    ),
    "an index that wrapped": (
        "out of bounds: .* memory that belongs to no buffer",
        Kernel(HEAD + "out[i] = x[i - 1];"),
    ),
    "a broadcast input read as if it were contiguous": (
        r"out of bounds: .* reads x\[1\] of 1",
        Kernel(HEAD + "out[i] = x[i];", x=mx.broadcast_to(mx.ones(1), (64,)), options={"ensure_row_contiguous": False}),
    ),
    "a write into an input": (
        "writes into the input x",
        Kernel(HEAD + "out[i] = 1; ((device float*)x)[i] = 2;"),
    ),
    "an overrun of a threadgroup array": (
        "an index outside an array",
        Kernel(HEAD + "threadgroup float tile[60];\ntile[i] = x[i]; out[i] = tile[i];"),
    ),
    "an overrun of a thread's array": (
        "an index outside an array",
        Kernel(HEAD + "float v[8]; for (uint k = 0; k <= 8 + i; k++) v[k] = x[k]; out[i] = v[i % 8];"),
    ),
    "a misaligned vector": (
        "a misaligned pointer",
        Kernel(HEAD + "out[i] = (*(const device float4*)(x + (i & 31) + 1)).x;"),
    ),
    "a shift by the whole width": ("a shift by as many bits", Kernel(HEAD + "out[i] = 1u << (i + 1);")),
    "a division by zero": ("a division by zero", Kernel(HEAD + "out[i] = 8 / int(i);")),
    "a read of threadgroup memory that nobody wrote": (
        "uninitialised: .* reads byte 252 of threadgroup memory",
        Kernel(
            TILE + "if (i < 63) tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[63 - i];"
        ),
    ),
    "threadgroup memory left by the group before": (
        "uninitialised: .* reads byte 124 of threadgroup memory",
        Kernel(
            TILE + "if (i < 32) tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[lane];",
            group=32,
        ),
    ),
    "an output read before it was written": (
        r"uninitialised: .* reads out\[0\]",
        Kernel(HEAD + "out[i] += x[i];"),
    ),
    "a body that counts on whole groups": (
        "uninitialised: .* reads byte 44 of threadgroup memory",
        Kernel(
            HEAD + "threadgroup float tile[64];\nuint t = thread_position_in_threadgroup.x; tile[t] = x[i];"
            " threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[6 + t % 32];",
            x=mx.ones(70),
            size=70,
            threads=70,
        ),
    ),
    "a grid that is too small": (r"unwritten: no thread wrote out\[63\]", Kernel(HEAD + "out[i] = x[i];", threads=63)),
    "a grid that is too large": (
        r"out of bounds: .* out\[64\] of 64",
        Kernel(HEAD + "out[i] = x[i % 64];", threads=65),
    ),
    "an empty grid": (r"a grid of \(0, 1, 1\) threads", Kernel(HEAD + "out[i] = x[i];", threads=0)),
    "too many threads in a group": ("1025 threads in a group", Kernel(HEAD + "out[i] = x[i];", group=1025)),
    "too much threadgroup memory": (
        "32772 bytes of threadgroup memory; Metal has 32768",
        Kernel(HEAD + "threadgroup float tile[8193];\ntile[i] = x[i]; out[i] = tile[i];"),
    ),
    "too many buffers": (
        "32 buffers; Metal has 31",
        Kernel(HEAD + "out[i] = x[i];", others={f"y{k}": mx.ones(8) for k in range(30)}),
    ),
    "too deep a stack": (
        "needs more than 65536 bytes of stack",
        Kernel(HEAD + "volatile float v[20000]; for (int k = 19999; k >= 0; k--) v[k] = x[i]; out[i] = v[i];"),
    ),
}

CHECK_FAULTS = {
    # ---- address spaces
    "a device pointer for an unqualified parameter": (
        "no matching function for call to 'first'",
        Kernel(HEAD + "out[i] = first(x);", "float first(const float* p) { return p[0]; }\n"),
    ),
    "a device pointer for a threadgroup parameter": (
        "no matching function.*first",
        Kernel(HEAD + "out[i] = first(x);", "float first(const threadgroup float* p) { return p[0]; }\n"),
    ),
    "a tiny input for a device parameter": (
        "no matching function.*first",
        Kernel(HEAD + "out[i] = first(x);", "float first(const device float* p) { return p[0]; }\n", x=mx.ones(4)),
    ),
    "a cast between address spaces": (
        "converts between mismatching address spaces",
        Kernel(HEAD + "threadgroup float* p = (threadgroup float*)out; out[i] = p[0];"),
    ),
    "a pointer without an address space": (
        "p is a pointer or reference without an address space",
        Kernel(HEAD + "float v[2] = {1, 2}; float* p = v; out[i] = p[i & 1];"),
    ),
    "a reference without an address space": (
        "v is a pointer or reference without an address space",
        Kernel(HEAD + "float v = x[i]; twice(v); out[i] = v;", "void twice(float& v) { v *= 2; }\n"),
    ),
    "a variable of the program": (
        "program scope variable must reside in constant address space",
        Kernel(HEAD + "out[i] = table[i & 1];", "float table[2] = {1, 2};\n"),
    ),
    "a static variable": ("static local variable", Kernel(HEAD + "static float seen = 0; out[i] = seen;")),
    "a threadgroup variable in a helper": (
        "non-kernel function variable cannot be declared in local address space",
        Kernel(
            HEAD + "out[i] = helper(i);", "float helper(uint i) { threadgroup float t[64]; t[i] = 1; return t[i]; }\n"
        ),
    ),
    "a threadgroup variable in an inner scope": (
        "can only be declared in the outermost scope",
        Kernel(HEAD + "if (i < 64) {\n  threadgroup float t[64];\n  t[i] = 1;\n  out[i] = t[i];\n}"),
    ),
    "a write to a constant input": ("read-only variable is not assignable", Kernel(HEAD + "x[i] = 2; out[i] = 1;")),
    # ---- types
    "double": ("use of type 'double'", Kernel(HEAD + "double y = x[i]; out[i] = y;")),
    "float to bfloat in silence": ("to '.*bf", Kernel(HEAD + "out[i] = x[i];", out=mx.bfloat16)),
    "float4 to half4 in silence": ("cannot initialize", Kernel(HEAD + "half4 h = float4(x[i]); out[i] = h.x;")),
    "max of half and float": (
        "call to 'max' is ambiguous",
        Kernel(HEAD + "out[i] = max(x[i], 0.0);", x=mx.ones(64, mx.float16)),
    ),
    "max of uint and int": ("call to 'max' is ambiguous", Kernel(HEAD + "out[i] = max(i, 3);")),
    "simd_sum of 64 bits": ("deleted function 'simd_sum'", Kernel(HEAD + "out[i] = simd_sum(ulong(i));")),
    "a shuffle of bool": ("deleted function 'simd_shuffle'", Kernel(HEAD + "out[i] = simd_shuffle(i > 3, 0);")),
    "an atomic on a plain output": (
        "no matching function .* 'atomic_fetch_add_explicit'",
        Kernel(HEAD + "atomic_fetch_add_explicit(&out[0], x[i], memory_order_relaxed);"),
    ),
    "a float atomic in threadgroup memory": (
        "no matching function .* 'atomic_fetch_add_explicit'",
        Kernel(
            HEAD
            + "threadgroup atomic<float> sum;\natomic_fetch_add_explicit(&sum, x[i], memory_order_relaxed); out[i] = 1;"
        ),
    ),
    "an order other than relaxed": (
        "memory_order_seq_cst",
        Kernel(
            HEAD + "atomic_fetch_add_explicit(&out[0], x[i], memory_order_seq_cst);", options={"atomic_outputs": True}
        ),
    ),
    "a scalar input with an index": (
        "subscripted value is not",
        Kernel(HEAD + "out[i] = x[i] * s[0];", others={"s": mx.array(2.0)}),
    ),
    "a one-element input without an index": (
        "invalid operands",
        Kernel(HEAD + "out[i] = x[i] * s;", others={"s": mx.array([2.0])}),
    ),
    "a matrix of another type than its memory": (
        "no matching function for call to 'simdgroup_load'",
        Kernel(MATRIX + "simdgroup_load(a, x); out[i] = 1;", x=mx.ones(64, mx.float16)),
    ),
    "a product of matrices of several types": (
        "no matching function for call to 'simdgroup_multiply_accumulate'",
        Kernel(MATRIX + "simdgroup_half8x8 h(1.0h); simdgroup_multiply_accumulate(sum, h, a, sum); out[i] = 1;"),
    ),
    "a matrix of 16 columns": (
        "a matrix of a SIMD group is 8 x 8",
        Kernel(HEAD + "simdgroup_matrix<float, 16, 8> wide; out[i] = wide.thread_elements()[0];"),
    ),
    # ---- names
    "a template argument that is not given": (
        "unknown type name 'T'",
        Kernel(HEAD + "T y = x[i]; out[i] = y;"),
    ),
    "a misspelt attribute": (
        "undeclared identifier 'thread_position_in_gird'",
        Kernel("out[thread_position_in_gird.x] = 1;"),
    ),
    "an attribute in a helper alone": (
        "undeclared identifier 'thread_index_in_simdgroup'",
        Kernel("out[at()] = x[0];", "uint at() { return thread_index_in_simdgroup; }\n"),
    ),
    "a variable with an attribute's name": (
        "redefinition of 'thread_index_in_simdgroup'",
        Kernel(HEAD + "uint thread_index_in_simdgroup = 0; out[i] = x[i];"),
    ),
    "shape of another name": ("undeclared identifier 'y_shape'", Kernel(HEAD + "out[i] = y_shape[0];")),
    "a name from C": ("undeclared identifier 'expf'", Kernel(HEAD + "out[i] = expf(x[i]);")),
    "a name from std": ("Metal has no std", Kernel(HEAD + "out[i] = std::max(x[i], 1.0f);")),
    "printf": ("Metal has no printf", Kernel(HEAD + 'printf("%d", i); out[i] = 1;')),
    # ---- language
    "an array of run-time size": (
        "array size is not a constant expression",
        Kernel(HEAD + "float v[i]; out[i] = v[0];"),
    ),
    "a pointer to a function": (
        "pointers to functions are not allowed",
        Kernel(HEAD + "float (*f)(float) = twice; out[i] = f(x[i]);", "float twice(float v) { return 2 * v; }\n"),
    ),
    "recursion": (
        "a function that calls itself",
        Kernel(
            HEAD + "out[i] = down(i);",
            "uint up(uint n);\nuint down(uint n) { return n ? up(n - 1) : 0; }\nuint up(uint n) { return down(n); }\n",
        ),
    ),
    "goto": ("Metal has no goto", Kernel(HEAD + "out[i] = 1; goto end; end: return;")),
    "a lambda": ("a lambda", Kernel(HEAD + "auto twice = [](float v) { return 2 * v; }; out[i] = twice(x[i]);")),
    "an exception": ("Metal has no throw", Kernel(HEAD + "if (i > 70) throw 1; out[i] = 1;")),
    "a virtual function": (
        "Metal has no virtual",
        Kernel(HEAD + "Base b; out[i] = b.f();", "struct Base { virtual float f() { return 1; } };\n"),
    ),
    "new": ("'default new' is not supported", Kernel(HEAD + "thread float* p = new float; out[i] = *p;")),
    "no value returned": (
        "non-void function does not return a value",
        Kernel(HEAD + "out[i] = f(i);", "float f(uint i) { if (i > 3) return 1; }\n"),
    ),
    "a variable without a value": (
        "'y' is used uninitialized",
        Kernel(HEAD + "float y; if (i > 3) y = 1; out[i] = y;"),
    ),
    "an index outside an array": ("past the end", Kernel(HEAD + "float v[2] = {1, 2}; out[i] = v[2];")),
    "a character that is not ASCII": ("reaches Metal as ASCII", Kernel(HEAD + "out[i] = 1; // 90°")),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_kernels_pass(name):
    kernel, expected = SOUND[name]
    assert kernel.run().astype(mx.float32).tolist() == expected


@pytest.mark.parametrize("name", RUN_FAULTS)
def test_the_run_finds(name, monkeypatch):
    monkeypatch.setattr(metal, "SECONDS", 0.3)
    message, kernel = RUN_FAULTS[name]
    with pytest.raises(metal.KernelError, match=message):
        kernel.run()


@pytest.mark.parametrize("name", CHECK_FAULTS)
def test_the_checker_finds(name):
    message, kernel = CHECK_FAULTS[name]
    with pytest.raises(metal.CheckError, match=message):
        kernel.run()


def test_the_build_finds_bfloat_with_half():
    with pytest.raises(metal.BuildError, match="ambiguous"):
        Kernel(HEAD + "out[i] = half(1) + x[i];", x=mx.ones(64, mx.bfloat16)).run()
