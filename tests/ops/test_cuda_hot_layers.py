"""Exchanges of hot experts on the device, beside the same rule in NumPy: slots, bytes, tables and counts."""

import ctypes
import re

import numpy as np
import pytest

from common.expert_profile import Profile

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import hot_layers  # noqa: E402
from cuda_backend.expert_stacks import Stack  # noqa: E402
from cuda_backend.host_memory import HostMemory  # noqa: E402
from cuda_backend.hot_layers import FADE, LEAVING, MAX_PARTS, MOST, SWAPS, HotLayers  # noqa: E402
from cuda_backend.launch import Stream  # noqa: E402
from cuda_backend.memory import Memory, upload  # noqa: E402
from cuda_backend.prototypes import CHOICE  # noqa: E402
from cuda_backend.sources import KERNELS  # noqa: E402
from cuda_backend.views import NOTHING  # noqa: E402
from cuda_backend.weights import Segment, Weight  # noqa: E402

pytestmark = pytest.mark.gpu

E, USED, SHARED = 40, 4, 1
SIZES = (
    70_000,
    33_008,
    16_384,
    1_234,
)  # bytes of an expert's parts: more than a chunk, whole chunks, and no multiple of 16


class Layer:
    """One layer of random bytes, its slots on the device, and the rule in NumPy."""

    def __init__(self, resident: int, seed: int):
        random = np.random.default_rng(seed)
        self.stream = Stream()
        self.host = [HostMemory(E * n, "a test") for n in SIZES]
        for memory in self.host:
            self.view(memory.address, memory.nbytes)[:] = random.integers(0, 256, memory.nbytes)
        addresses = [
            m.address + np.arange(E, dtype=np.uint64) * np.uint64(n) for m, n in zip(self.host, SIZES, strict=True)
        ]
        self.tables = [upload(a, self.stream) for a in addresses]
        segments = [Segment("F16", 1, 1, E, m, t, True) for m, t in zip(self.host, self.tables, strict=True)]
        padded = [-(-n // 256) * 256 for n in SIZES]
        self.stacks = [self.stack(segments[:3], padded[:3]), self.stack(segments[3:], padded[3:])]
        self.size, self.offsets = sum(padded), np.cumsum([0, *padded[:3]])
        self.memory = Memory(self.size * (resident + 1))
        self.slots = np.full(E, -1, np.int32)
        self.slots[random.permutation(E)[:resident]] = 1 + random.permutation(resident)
        counts = random.integers(0, 9, (1, E))
        for e in np.flatnonzero(self.slots >= 0):
            for part, (memory, n) in enumerate(zip(self.host, SIZES, strict=True)):
                self.copy(self.place(e, part), memory.address + e * n, n, cupy.cuda.runtime.memcpyHostToDevice)
                self.copy_table(part, e, self.place(e, part))
        profile = Profile(counts, USED)
        self.scores = (counts[0] / (counts.sum() / USED) / (1 - FADE)).astype(np.float32)
        at = [(self.memory.address, self.size)]
        self.hot = HotLayers([self.stacks], self.slots[None], at, profile, [0], USED + SHARED, self.stream)
        self.uses, self.counts = np.zeros(E, np.int64), np.zeros(4, np.int64)

    def stack(self, segments, padded):
        weight = Weight(tuple(segments), 0, 0)
        return Stack(weight, weight, tuple(np.cumsum([0, *padded[:-1]]).tolist()), sum(padded))

    def view(self, address, n):
        return np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address))

    def place(self, e, part):
        return int(self.memory.address + int(self.slots[e]) * self.size + self.offsets[part])

    def copy(self, to, from_, n, kind):
        cupy.cuda.runtime.memcpyAsync(int(to), int(from_), n, kind, self.stream.ptr)  # CuPy refuses NumPy's integers
        self.stream.synchronize()

    def copy_table(self, part, e, address):
        one = np.array([address], np.uint64)
        self.copy(self.tables[part].address + 8 * e, one.ctypes.data, 8, cupy.cuda.runtime.memcpyHostToDevice)

    def expect(self, ids: np.ndarray) -> None:
        """Apply the rule to the experts (rows, ids per row) of a step."""
        rows, chosen = len(ids), np.unique(ids[ids < E])
        cold = sorted((e for e in chosen if self.slots[e] < 0), key=lambda e: (-self.scores[e], e))
        held = np.flatnonzero(self.slots >= 0)
        leaving = held[np.argsort(self.scores[held], kind="stable")][:LEAVING]
        going = [e for e in leaving if e not in chosen]
        self.counts += np.array([len(chosen), len(cold), 0, 0])
        for come, go in list(zip(cold, going, strict=False))[:SWAPS]:
            if self.scores[come] + np.float32(1 / np.float32(FADE)) <= self.scores[go]:
                break
            self.slots[come], self.slots[go] = self.slots[go], -1
            self.counts[3] += 1
        used = np.bincount(ids[ids < E], minlength=E)
        self.uses += used
        faded = FADE**rows
        self.scores = (self.scores * faded + used * (1 - faded) / ((1 - FADE) * rows)).astype(np.float32)

    def check(self) -> None:
        now = self.hot.read()
        assert np.array_equal(now.slots[0], self.slots)
        assert np.array_equal(now.uses[0], self.uses)
        assert [now.needed[0], now.cold[0], now.in_prompts[0], now.exchanges[0]] == self.counts.tolist()
        self.check_bytes()

    def check_bytes(self) -> None:
        for part, (memory, n) in enumerate(zip(self.host, SIZES, strict=True)):
            table, held = np.zeros(E, np.uint64), np.zeros(n, np.uint8)
            kind = cupy.cuda.runtime.memcpyDeviceToHost
            self.copy(table.ctypes.data, self.tables[part].address, table.nbytes, kind)
            for e in range(E):
                own = memory.address + e * n
                assert int(table[e]) == (own if self.slots[e] < 0 else self.place(e, part)), (part, e)
                if self.slots[e] >= 0:
                    self.copy(held.ctypes.data, int(table[e]), n, kind)
                    assert np.array_equal(held, self.view(own, n)), (part, e)


def chosen_of(random: np.random.Generator, rows: int) -> np.ndarray:
    """Draw (rows, ids per row) ids with a skew; the last of each row is the shared expert's."""
    keys = -0.8 * np.log(np.arange(1, E + 1)) + random.gumbel(size=(rows, E))
    return np.concatenate([np.argsort(-keys, axis=1)[:, :USED], np.full((rows, SHARED), E)], axis=1).astype(np.int32)


@pytest.mark.parametrize(("resident", "copiers"), [(5, 2), (24, 64), (36, 3)])
def test_exchanges(resident, copiers, monkeypatch):
    """Steps of one and more rows: the rule's slots, and in each slot all bytes of its expert."""
    monkeypatch.setattr(hot_layers, "COPIERS", copiers)
    layer, random = Layer(resident, resident), np.random.default_rng(1)
    for rows in (1, 1, 7, 1, 40, 1, 1, 1):
        ids = chosen_of(random, rows)
        held = upload(ids, layer.stream)
        layer.hot.fetch(0, np.zeros((), CHOICE), held.address, 0, rows, USED + SHARED)
        layer.hot.keep()
        layer.expect(ids)
        layer.check()
    assert layer.counts[3] > 4


def test_a_step_reads_what_it_has_fetched():
    """Tables are right as soon as `fetch` has run: those of experts that came, and of those that left."""
    layer, random = Layer(12, 3), np.random.default_rng(2)
    ids = chosen_of(random, 9)
    held = upload(ids, layer.stream)
    layer.hot.fetch(0, np.zeros((), CHOICE), held.address, 0, 9, USED + SHARED)
    before = layer.slots.copy()
    layer.expect(ids)
    assert not np.array_equal(before, layer.slots)
    layer.check_bytes()
    layer.hot.keep()
    layer.check()


def test_one_row_chooses_by_itself():
    """With logits instead of ids `fetch` chooses as the products do."""
    layer, random = Layer(20, 4), np.random.default_rng(5)
    weights = Memory(4 * USED)
    for _ in range(3):
        logits = random.normal(scale=3.0, size=E).astype(np.float32)
        held = upload(logits, layer.stream)
        choice = np.array((held.address, 0, weights.address, NOTHING, E, USED, 0, 0, 0, 1.0), CHOICE)
        layer.hot.fetch(0, choice, 0, 0, 1, USED)
        layer.hot.keep()
        layer.expect(np.argsort(-logits, kind="stable")[None, :USED].astype(np.int32))
        layer.check()


def test_a_prompt_counts_and_exchanges_nothing():
    layer, random = Layer(20, 6), np.random.default_rng(7)
    ids = chosen_of(random, 150)
    held = upload(ids, layer.stream)
    layer.hot.count(0, held.address, 0, 150, USED + SHARED)
    chosen = np.unique(ids[ids < E])
    layer.uses += np.bincount(ids[ids < E], minlength=E)
    layer.counts += np.array([len(chosen), 0, np.count_nonzero(layer.slots[chosen] < 0), 0])
    layer.check()


def test_the_kernel_states_the_same_numbers():
    text = (KERNELS / "hot_experts.cu").read_text()
    for name, value in (
        ("MOST", MOST),
        ("SWAPS", SWAPS),
        ("LEAVING", LEAVING),
        ("MAX_PARTS", MAX_PARTS),
        ("FADE", f"{FADE}f"),
    ):
        assert re.search(rf"^#define {name} +{re.escape(str(value))}\s", text, re.MULTILINE), name
