"""Write kv_golden.json: what each cache format makes of sin(0), sin(1), ..., as hex, for the backends to agree with.

The blocks of q4_0 to q8_0 are those of the `gguf` package; the others are common/kv_formats.py's, which
tests/formats/test_kv_formats.py holds against published vectors.
"""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

from common.hadamard import rotate
from common.kv_formats import FORMATS

SIZES = (64, 128, 256)


def main() -> None:
    golden: dict[str, dict[str, str]] = {}
    for dim in SIZES:
        x = np.sin(np.arange(dim)).astype(np.float32)
        for name, format_ in FORMATS.items():
            if name.startswith("q"):
                rows = quants.quantize(x, GGMLQuantizationType[name.upper()])
            else:
                rows = format_.encode(rotate(x) if not format_.group else x)
            golden.setdefault(name, {})[str(dim)] = rows.tobytes().hex()
    Path(__file__).with_name("kv_golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
