"""Makes embedding_golden.json: embeddings of llama.cpp's server, of the tiny model of tests/tiny_chat.py.

PYTHONPATH=.:tests python tests/data/make_embedding_golden.py path/to/llama-server
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import tiny_chat

URL = "http://127.0.0.1:8191"
TEXTS = ["a", "def add(a, b):\n    return a + b\n", "Zürich " * 30]


def post(path: str, **sent: Any) -> Any:
    request = urllib.request.Request(URL + path, json.dumps(sent).encode(), {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())


def asked(server: str, file: Path, pooling: str) -> list[Any]:
    flags = f"-m {file} --port 8191 -t 1 -ctk f32 -ctv f32 -fa off -c 512 --embeddings --pooling {pooling}"
    process = subprocess.Popen([server, *flags.split()], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            time.sleep(0.1)
            try:
                urllib.request.urlopen(f"{URL}/health")
                break
            except OSError:
                continue
        return [each["embedding"] for each in post("/v1/embeddings", input=TEXTS)["data"]]
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model, file = tiny_chat.write(Path(folder) / "tiny", fim=tiny_chat.FIM), Path(folder) / "tiny.gguf"
        subprocess.run(
            [sys.executable, "-m", "generate", "quantize", str(model), str(file), "--type", "F32"], check=True
        )
        golden = {pooling: asked(sys.argv[1], file, pooling) for pooling in ("last", "mean")}
    out = Path(__file__).parent / "embedding_golden.json"
    out.write_text(json.dumps({"texts": TEXTS, **golden}) + "\n")
