"""CudaOps that ignores what a tensor holds and makes random blocks of its type on the device, for measuring shapes."""

import zlib
from typing import Any

from common.quants import BLOCKS, RANDOM_HALVES
from common.tensors import Tensor
from cuda_backend.launch import kernel
from cuda_backend.ops import CudaOps
from cuda_backend.weights import Stage


class RandomOps(CudaOps):
    @property
    def stage(self) -> Stage:
        return self._random_rows

    def _random_rows(self, tensor: Tensor, _: Any, rows: slice) -> int:
        """Random blocks for as many rows."""
        block = BLOCKS[tensor.type]
        nbytes = (rows.stop - rows.start) * tensor.data.shape[-1]
        self.uploader.finish()  # whose launches may still read what the room holds
        address = self.uploader.room(nbytes + 4)
        args = (address, -(-nbytes // 4), (zlib.crc32(tensor.name.encode()) + rows.start) % (1 << 32))
        kernel("random", "fill")((1024,), (256,), args, stream=self.context.stream)
        n = nbytes // block.bytes
        for at, value in zip(block.halves, RANDOM_HALVES[tensor.type], strict=True):
            halves = (address, n, block.bytes, at, value)
            kernel("random", "set_halves")((-(-n // 256),), (256,), halves, stream=self.context.stream)
        return address
