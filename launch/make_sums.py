"""Writes the built-in task, byte for byte as it is shipped: two-digit sums for training, held-out evaluation and the
supervised warm-up, and the tokenizer of the built-in model. `python launch/make_sums.py [FOLDER]` (default: the package).

Every ordered pair of numbers from 10 to 99 is one prompt, `27+58=`; 1,024 pairs are held out. The warm-up shows each
training pair COPIES times with every digit of the answer replaced, with chance NOISE, by a random digit. It
teaches the form of an answer and where the right digits lie most likely, not to trust them: that is left to RL.
"""

from __future__ import annotations

import json
import pathlib
import random
import string
import sys

from rljax.hub import BUILTIN
from rljax.tokenizer import character_tokenizer

HELD_OUT, COPIES, NOISE, SEED = 1024, 3, 0.30, 7
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def corrupt(answer: str, draw: random.Random) -> str:
    """Each digit of `answer` replaced by a random one with chance NOISE."""
    return "".join(draw.choice(string.digits) if draw.random() < NOISE else digit for digit in answer)


def write(path: pathlib.Path, rows: list[tuple[str, str]]) -> None:
    """One {"prompt", "label"} object a line."""
    path.write_text("".join(json.dumps({"prompt": p, "label": a}) + "\n" for p, a in rows), encoding="utf-8")


def main(folder: pathlib.Path) -> None:
    """Write tiny/tokenizer* and sums/*.jsonl below `folder`."""
    draw = random.Random(SEED)
    rows = [(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(rows)
    held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
    warmup = [(prompt, corrupt(answer, draw)) for _ in range(COPIES) for prompt, answer in train]
    for name in ("tiny", "sums"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write(folder / "sums" / "train.jsonl", train)
    write(folder / "sums" / "heldout.jsonl", held_out)
    write(folder / "sums" / "warmup.jsonl", warmup)
    character_tokenizer(CHARACTERS, folder / "tiny")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else BUILTIN)
