"""`python -m generate devices`: the backends of this machine, and which one is the default."""

from generate.backends import CACHED, CHOICE, FINDERS, choose


def run() -> int:
    chosen = choose(None).name
    for find in FINDERS.values():
        found = find()
        mark = "chosen" if found.name == chosen else "usable" if found.usable else "no"
        print(f"{found.name:6} {mark:7} {found.description}")
    print(f"{CHOICE.format(tokens=CACHED)}; --backend picks another")
    return 0
