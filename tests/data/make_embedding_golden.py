"""Makes embedding_golden.json: embeddings of llama.cpp's server, of the tiny model of tests/tiny_chat.py.

PYTHONPATH=.:tests python tests/data/make_embedding_golden.py path/to/llama-server
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_chat
from llama_server import gguf_of, running

TEXTS = ["a", "def add(a, b):\n    return a + b\n", "Zürich " * 30]


def embeddings(server: str, file: Path, pooling: str) -> list[Any]:
    with running(server, file, f"-c 512 --embeddings --pooling {pooling}") as post:
        return [each["embedding"] for each in post("/v1/embeddings", {"input": TEXTS})["data"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = gguf_of(tiny_chat.write(Path(folder) / "tiny", fim=tiny_chat.FIM))
        golden = {pooling: embeddings(sys.argv[1], file, pooling) for pooling in ("last", "mean")}
    out = Path(__file__).parent / "embedding_golden.json"
    out.write_text(json.dumps({"texts": TEXTS, **golden}) + "\n")
