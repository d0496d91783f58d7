"""How GPUs that share every layer exchange rows: through each other's memory, or by NCCL where they cannot reach it."""

import itertools
import sys
from collections.abc import Sequence

import cupy

from common.errors import BimetalError
from cuda_backend.exchange import Exchange
from cuda_backend.nccl_exchange import NcclExchange, find_nccl, package
from cuda_backend.relay import Gpu
from cuda_backend.several_gpus import connect

Transport = Exchange | NcclExchange


def open_exchange(gpus: Sequence[Gpu]) -> Transport:
    """The exchange of `gpus`, whose places are the ranks; BimetalError where they have no way to exchange rows."""
    pairs = [(a.index, b.index) for a, b in itertools.permutations(gpus, 2)]
    apart = next((pair for pair in pairs if not cupy.cuda.runtime.deviceCanAccessPeer(*pair)), None)
    if apart is None:
        for pair in pairs:
            connect(*pair)
        return Exchange(gpus)
    cannot = f"GPUs {apart[0]} and {apart[1]} cannot reach each other's memory"
    if (nccl := find_nccl()) is None:
        raise BimetalError(
            f"{cannot}, which tensor_parallel needs without NCCL (pip install {package()}); "
            "use split, by which each holds some of the layers"
        )
    print(f"{cannot}: NCCL exchanges their rows, and split may be faster", file=sys.stderr)
    return NcclExchange(gpus, nccl)
