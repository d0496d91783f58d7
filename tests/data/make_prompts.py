"""Write tests/data/prompts.jsonl: the beginnings of 200 functions of this repository, for decoding tests.

A prompt is a function's first lines, up to 12 and 480 characters, whole lines; evenly spaced over all functions of the
packages, in the order of their paths.
"""

import ast
import json
from pathlib import Path

HERE = Path(__file__).parent
COUNT, LINES, CHARACTERS = 200, 12, 480


def beginnings() -> list[str]:
    found = []
    for package in ("common", "generate", "mlx_backend", "cuda_backend"):
        for path in sorted((HERE.parents[1] / package).rglob("*.py")):
            text = path.read_text()
            lines = text.splitlines(keepends=True)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 6:
                    prompt = ""
                    for line in lines[node.lineno - 1 : node.lineno - 1 + LINES]:
                        if len(prompt) + len(line) > CHARACTERS:
                            break
                        prompt += line
                    found.append(prompt)
    return found


if __name__ == "__main__":
    found = beginnings()
    chosen = [found[i * len(found) // COUNT] for i in range(COUNT)]
    (HERE / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in chosen))
    print(len(found), "functions,", sum(map(len, chosen)), "characters")
