"""Block formats: their sizes, and their decoding to float32."""

from typing import NamedTuple


class Block(NamedTuple):
    """How a GGUF type stores a row: `bytes` bytes for every `elements` values; `id` is ggml's number for the type."""

    id: int
    elements: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.elements


BLOCKS = {
    "F32": Block(0, 1, 4),
    "F16": Block(1, 1, 2),
    "Q4_0": Block(2, 32, 18),
    "Q4_1": Block(3, 32, 20),
    "Q5_0": Block(6, 32, 22),
    "Q5_1": Block(7, 32, 24),
    "Q8_0": Block(8, 32, 34),
    "Q2_K": Block(10, 256, 84),
    "Q3_K": Block(11, 256, 110),
    "Q4_K": Block(12, 256, 144),
    "Q5_K": Block(13, 256, 176),
    "Q6_K": Block(14, 256, 210),
    "IQ2_XXS": Block(16, 256, 66),
    "IQ2_XS": Block(17, 256, 74),
    "IQ3_XXS": Block(18, 256, 98),
    "IQ1_S": Block(19, 256, 50),
    "IQ4_NL": Block(20, 32, 18),
    "IQ3_S": Block(21, 256, 110),
    "IQ2_S": Block(22, 256, 82),
    "IQ4_XS": Block(23, 256, 136),
    "I8": Block(24, 1, 1),
    "I16": Block(25, 1, 2),
    "I32": Block(26, 1, 4),
    "I64": Block(27, 1, 8),
    "F64": Block(28, 1, 8),
    "IQ1_M": Block(29, 256, 56),
    "BF16": Block(30, 1, 2),
    "TQ1_0": Block(34, 256, 54),
    "TQ2_0": Block(35, 256, 66),
    "MXFP4": Block(39, 32, 17),
    "NVFP4": Block(40, 64, 36),
}
