"""Traces of routing: the experts that a model chose, token by token; recorded, or synthetic with a given skew.

Random weights route uniformly, so that a cache of experts has no benefit. A benchmark replays a trace instead: recorded
from a trained model, or synthetic. The experts of a synthetic trace follow a Zipf law that drifts with the topic of the
text, and some experts are those of the previous token.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from common.errors import BimetalError
from common.expert_profile import Profile
from common.files import rewriting

HEADER = re.compile(r"#\s*routing trace:\s*n_layer=(\d+)\s+n_expert=(\d+)\s+n_expert_used=(\d+)\s*")


@dataclass(frozen=True)
class Trace:
    """The experts that tokens chose.

    ids      (tokens, layers, used) int32, for the layers that have experts
    experts  number of experts per layer
    """

    ids: np.ndarray
    experts: int

    def profile(self, tokens: int, layers: list[int]) -> Profile:
        """Count how often the first `tokens` tokens chose each expert; `layers`: the model's layers with experts."""
        counts = np.zeros((max(layers) + 1, self.experts), np.int64)
        for i, layer in enumerate(layers):
            counts[layer] = np.bincount(self.ids[:tokens, i].ravel(), minlength=self.experts)
        return Profile(counts, self.ids.shape[2])

    def over(self, layers: int, experts: int, used: int) -> "Trace":
        """Return the trace for a model with `layers` layers of experts; a trace of fewer layers is repeated.

        Each repetition begins at another token of the text. Raises BimetalError if `experts` or `used` differ.
        """
        tokens, own, takes = self.ids.shape
        if (self.experts, takes) != (experts, used):
            theirs, ours = f"{takes} of {self.experts} experts", f"{used} of {experts}"
            raise BimetalError(f"the trace is of another model: its tokens take {theirs}, and this model's {ours}")
        times = -(-layers // own)
        repeated = [np.roll(self.ids, -(n * tokens // times), axis=0) for n in range(times)]
        return Trace(np.ascontiguousarray(np.concatenate(repeated, axis=1)[:, :layers]), experts)

    def lru_hits(self, share: float) -> float:
        """Compute the hit rate of a plain LRU cache of `share` of each layer's experts, over the second half."""
        slots, hits = max(1, int(share * self.experts)), 0
        for layer in range(self.ids.shape[1]):
            held: OrderedDict[int, None] = OrderedDict()
            for token, row in enumerate(self.ids[:, layer].tolist()):
                for expert in row:
                    hits += expert in held and token >= len(self.ids) // 2
                    held[expert] = None
                    held.move_to_end(expert)
                    if len(held) > slots:
                        held.popitem(last=False)
        return hits / max(1, self.ids[len(self.ids) // 2 :].size)


@dataclass(frozen=True)
class Skew:
    """Parameters of a synthetic trace's routing.

    zipf      exponent of the experts' popularity by rank
    drift     standard deviation of the logarithm by which a topic changes each expert's popularity
    topic     tokens of a topic
    locality  probability that an expert of the previous token is chosen again, in addition to its popularity
    """

    zipf: float = 1.0
    drift: float = 1.5
    topic: int = 512
    locality: float = 0.1


def synthetic_trace(layers: int, experts: int, used: int, tokens: int, skew: Skew, seed: int = 0) -> Trace:
    """Return a trace of random routing, each layer by itself."""
    random = np.random.default_rng(seed)
    base = random.permuted(np.tile(-skew.zipf * np.log(np.arange(1, experts + 1)), (layers, 1)), axis=1)
    ids = np.empty((tokens, layers, used), np.int32)
    for token in range(tokens):
        if token % skew.topic == 0:
            popularity = base + skew.drift * random.normal(size=base.shape)
        keys = popularity + random.gumbel(size=base.shape)  # the largest are a draw without replacement
        if token:
            again = np.where(random.random((layers, used)) < skew.locality, np.inf, -np.inf)
            before = np.take_along_axis(keys, ids[token - 1], 1)
            np.put_along_axis(keys, ids[token - 1], np.maximum(before, again), 1)
        ids[token] = np.argpartition(-keys, used - 1, axis=1)[:, :used]
    return Trace(ids, experts)


def write_trace(path: Path, trace: Trace) -> None:
    """Write `path`, a .npz or a .csv file, atomically. Raises OSError."""
    tokens, layers, used = trace.ids.shape
    with rewriting(path) as file:
        if path.suffix == ".npz":
            np.savez_compressed(file, ids=trace.ids.astype(np.uint16), experts=trace.experts)
            return
        head = f"# routing trace: n_layer={layers} n_expert={trace.experts} n_expert_used={used}\n"
        file.write(f"{head}# token, layer, experts\n".encode())
        places = np.indices((tokens, layers)).reshape(2, -1).T
        table = np.concatenate((places, trace.ids.reshape(-1, used)), axis=1)
        np.savetxt(file, table, "%d", ",")


def read_trace(path: Path) -> Trace:
    """Read a .npz file of `ids` (tokens, layers, used) and `experts`, or a .csv file. Raises BimetalError."""
    try:
        trace = _read_npz(path) if path.suffix == ".npz" else _read_csv(path)
    except OSError as error:
        raise BimetalError(f"{path} cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError, BadZipFile) as error:
        raise BimetalError(f"{path} is not a trace of routing: {error}") from None
    ids = trace.ids
    if ids.ndim != 3 or ids.size == 0 or ids.min() < 0 or ids.max() >= trace.experts:
        shape = f"(tokens, layers, used) below {trace.experts}"
        raise BimetalError(f"{path} is not a trace of routing: its ids are not {shape}")
    return trace


def _read_npz(path: Path) -> Trace:
    with np.load(path, allow_pickle=False) as file:
        return Trace(file["ids"].astype(np.int32), int(file["experts"]))


def _read_csv(path: Path) -> Trace:
    with path.open() as file:
        stated = HEADER.fullmatch(file.readline().strip())
        if stated is None:
            raise ValueError("its first line is not '# routing trace: n_layer=... n_expert=... n_expert_used=...'")
        layers, experts, used = map(int, stated.groups())
        rows = np.loadtxt(file, np.int32, delimiter=",", comments="#", ndmin=2)
    if rows.shape[1] != used + 2 or len(rows) % layers or np.any(rows[:, 1] != np.arange(len(rows)) % layers):
        raise ValueError(f"a token has {layers} lines of a token, a layer and {used} experts")
    return Trace(np.ascontiguousarray(rows[:, 2:].reshape(-1, layers, used)), experts)
