"""Templated questions with exact answers, for a small WeDLM: arithmetic, counting and short Python functions.

`sample(random, task)` draws one question and its answer; `held_out(task)` is a fixed set that training never draws.
Training also reads stories, whose words are drawn freely: entropies are learnt where nothing can be known.
"""

import random
from functools import cache

TASKS = ("arithmetic", "counting", "code")
NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ida",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Noor",
    "Oto",
    "Pia",
]
THINGS = ["apples", "books", "coins", "cards", "eggs", "keys", "maps", "nuts", "pens", "shells", "stamps", "stones"]
GAINS = ["buys", "finds", "gets", "picks"]
LOSSES = ["drops", "gives", "loses", "sells"]
VALUES = ["count", "index", "level", "price", "score", "size", "total", "value"]
HELD_OUT = 200


def sample(draw: random.Random, task: str) -> tuple[str, str]:
    """A question, which ends with its newline, and the answer, without an end token."""
    return {"arithmetic": _arithmetic, "counting": _counting, "code": _code, "story": _story}[task](draw)


@cache
def held_out(task: str) -> tuple[tuple[str, str], ...]:
    """HELD_OUT questions of `task`, all different."""
    draw, found = random.Random(f"held out {task}"), dict[str, str]()
    while len(found) < HELD_OUT:
        question, answer = sample(draw, task)
        found[question] = answer
    return tuple(found.items())


def training(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` questions of all tasks in turn; none is held out."""
    draw, rows, tasks = random.Random(seed), list[tuple[str, str]](), (*TASKS, "story")
    kept_back = {task: {question for question, _ in held_out(task)} for task in TASKS} | {"story": set()}
    while len(rows) < count:
        task = tasks[len(rows) % len(tasks)]
        question, answer = sample(draw, task)
        if question not in kept_back[task]:
            rows.append((question, answer))
    return rows


def _arithmetic(draw: random.Random) -> tuple[str, str]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    first, gain = draw.randint(10, 99), draw.randint(2, 60)
    between = first + gain
    loss = draw.randint(1, between - 1)
    question = (
        f"Question: {name} has {first} {thing}, {draw.choice(GAINS)} {gain} more and {draw.choice(LOSSES)} {loss}. "
        f"How many {thing} are left?\n"
    )
    answer = (
        f"Answer: {name} has {first} + {gain} = {between} {thing}. Then {between} - {loss} = {between - loss}. "
        f"The answer is {between - loss} {thing}.\n"
    )
    return question, answer


def _counting(draw: random.Random) -> tuple[str, str]:
    start, length, step = draw.randint(1, 80), draw.randint(4, 12), draw.choice((1, 1, 2, 5, -1))
    if step < 0:
        start += length
    numbers = [start + i * step for i in range(length)]
    by = "" if abs(step) == 1 else f" by {step}"
    return (
        f"Question: Count{by} from {numbers[0]} to {numbers[-1]}.\n",
        f"Answer: {', '.join(map(str, numbers))}.\n",
    )


def _code(draw: random.Random) -> tuple[str, str]:
    value, number, thing = draw.choice(VALUES), draw.randint(2, 99), draw.choice(THINGS)
    forms = (
        (
            f"Write add_{number} of {value}.",
            f"def add_{number}({value}):\n    return {value} + {number}\n",
        ),
        (
            f"Write a loop over {thing} that prints each {value} above {number}.",
            f"for {value} in {thing}:\n    if {value} > {number}:\n        print({value})\n",
        ),
        (
            f"Write the sum of all {thing} up to {number}.",
            f"total = 0\nfor i in range({number}):\n    total += {thing}[i]\nprint(total)\n",
        ),
        (
            f"Write is_large of {value}, which compares with {number}.",
            f"def is_large({value}):\n    if {value} >= {number}:\n        return True\n    return False\n",
        ),
        (
            f"Write a class for {thing} with {value} {number}.",
            f"class {thing.title()}:\n    def __init__(self):\n        self.{value} = {number}\n",
        ),
    )
    question, answer = draw.choice(forms)
    return f"Question: {question}\n", f"Answer:\n{answer}"


def _story(draw: random.Random) -> tuple[str, str]:
    name = draw.choice(NAMES)
    sentences = (
        f"{draw.choice(NAMES)} {draw.choice(GAINS + LOSSES)} {draw.randint(2, 99)} {draw.choice(THINGS)}."
        for _ in range(draw.randint(2, 4))
    )
    return (
        f"Question: Tell a story about {name}.\n",
        f"Answer: {name} has {draw.choice(THINGS)}. {' '.join(sentences)}\n",
    )
