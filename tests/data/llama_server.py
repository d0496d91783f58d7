"""llama.cpp's server over one GGUF file, as the scripts that make golden files ask it."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

URL = "http://127.0.0.1:8191"


def gguf_of(folder: Path) -> Path:
    """Write the model of a folder to a GGUF file beside it, in float32."""
    file = folder.with_suffix(".gguf")
    subprocess.run([sys.executable, "-m", "generate", "quantize", str(folder), str(file), "--type", "F32"], check=True)
    return file


@contextmanager
def running(server: str, file: Path, flags: str) -> Iterator[Callable[[str, dict[str, Any]], Any]]:
    """Provide a function that posts JSON to a path of the server; its caches are float32."""
    command = f"{server} -m {file} --port 8191 -t 1 -ctk f32 -ctv f32 -fa off {flags}"
    process = subprocess.Popen(command.split(), stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            time.sleep(0.1)
            try:
                urllib.request.urlopen(f"{URL}/health")
                break
            except OSError:
                continue
        yield _post
    finally:
        process.kill()
        process.wait()


def _post(path: str, sent: dict[str, Any]) -> Any:
    request = urllib.request.Request(URL + path, json.dumps(sent).encode(), {"content-type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())
