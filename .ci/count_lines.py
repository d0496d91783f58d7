"""Prints the lines of code by folder and language, without blank lines and comment lines, so that growth is seen."""

import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

COMMENTS = {".py": "#", ".cu": "//", ".cuh": "//", ".metal": "//", ".h": "//", ".cpp": "//"}


def main() -> None:
    root = Path(__file__).parents[1]
    files = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    counts: Counter[tuple[str, str]] = Counter()
    for path in map(PurePosixPath, files):
        if path.suffix in COMMENTS and (root / path).exists():
            text = [line.strip() for line in (root / path).read_text(encoding="utf-8").splitlines()]
            code = sum(1 for line in text if line and not line.startswith(COMMENTS[path.suffix]))
            counts[path.parts[0] if len(path.parts) > 1 else ".", path.suffix] += code
    print(f"{'folder':16}{'kind':8}{'lines':>8}")
    for (folder, kind), lines in sorted(counts.items()):
        print(f"{folder:16}{kind:8}{lines:8}")
    product = sum(lines for (folder, _), lines in counts.items() if folder not in ("tests", "examples", ".ci"))
    print(f"{'all':24}{sum(counts.values()):8}\n{'without tests':24}{product:8}")


if __name__ == "__main__":
    main()
