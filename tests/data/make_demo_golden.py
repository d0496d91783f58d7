"""Write tests/data/demo_golden.json: what llama.cpp answers greedily with the demo model that comes with the package.

Made with llama-cpp-python 0.3.36 on the CPU from demo-qwen35-Q8_0.gguf with its weights expanded to float32, as
llama.cpp rounds activations to 8 bits before it multiplies quantized ones. For each prompt: its ids, the ids of the
next greedy tokens, and for each of these by how much its logit beats the second best. A reply ends before the first
token that beats it by less than CLOSE, where another float32 program may choose otherwise.
"""

import json
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import make_smollm2_golden as other
from oracle_llama_cpp import open_llama

from common.demo import demo_path

CLOSE = 0.002
PROMPTS = [
    "def fibonacci(n):\n",
    "import numpy as np\n\n\ndef softmax(x):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    '    def test_empty(self):\n        """An empty list has no maximum."""\n',
    "for größe in range(3):\n",
    "try:\n    value = int(text)\nexcept ",
]


def greedy(llm: other.Llama, prompt: str) -> dict[str, object]:
    found = other.greedy(llm, prompt)
    sure = len(list(takewhile(lambda margin: margin >= CLOSE, found["margins"])))
    return found | {"reply": found["reply"][:sure], "margins": found["margins"][:sure]}


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        llm = open_llama(other.expand(demo_path(), Path(folder) / "expanded.gguf"), 256)
        rows = ",\n".join(json.dumps(greedy(llm, prompt), ensure_ascii=False) for prompt in PROMPTS)
    Path(__file__).with_name("demo_golden.json").write_text(f"[\n{rows}\n]\n")
