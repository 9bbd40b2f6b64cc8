"""Writes the built-in tasks, byte for byte as they are shipped: two-digit sums for training, held-out evaluation and
the supervised warm-up, with the tokenizer of the built-in model; a second warm-up, whose answers state a confidence;
and small additions in a chat, for SmolLM2. `python launch/make_sums.py [FOLDER]` (default: the package).

Every ordered pair of numbers from 10 to 99 is one prompt, `27+58=`; 1,024 pairs are held out. The warm-up shows each
training pair COPIES times with every digit of the answer replaced, with chance NOISE, by a random digit. It
teaches the form of an answer and where the right digits lie most likely, not to trust them: that is left to RL.

The second warm-up shows the first CONFIDENT training pairs once, corrupted alike, each with a line `CONFIDENCE: 0.4`
whose number is drawn from 0.0, 0.1, ..., 1.0 whatever the answer. It teaches the form of the statement and that any
number may stand there. Training and evaluation with confidences use the files of the sums.
"""

from __future__ import annotations

import json
import pathlib
import random
import string
import sys
from typing import Any

from rljax.hub import BUILTIN
from rljax.tokenizer import character_tokenizer

HELD_OUT, CHAT_HELD_OUT, COPIES, CONFIDENT, NOISE, SEED = 1024, 16, 3, 4096, 0.33, 7
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def corrupt(answer: str, draw: random.Random) -> str:
    """Each digit of `answer` replaced by a random one with chance NOISE."""
    return "".join(draw.choice(string.digits) if draw.random() < NOISE else digit for digit in answer)


def confident(train: list[tuple[str, str]], draw: random.Random) -> list[tuple[str, str]]:
    """Corrupted answers, each followed by a line with a confidence that says nothing about it."""
    return [(prompt, f"{corrupt(answer, draw)}\nCONFIDENCE: {draw.randrange(11) / 10}") for prompt, answer in train]


def chat(draw: random.Random) -> list[tuple[list[dict[str, str]], str]]:
    """Every ordered pair of numbers from 1 to 9, shuffled, as chat messages with the sum."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    draw.shuffle(pairs)
    system = {"role": "system", "content": "You are a helpful assistant."}
    return [
        ([system, {"role": "user", "content": f"Compute {a} + {b}. Give only the result."}], str(a + b))
        for a, b in pairs
    ]


def write(path: pathlib.Path, rows: list[tuple[Any, str]]) -> None:
    """One {"prompt", "label"} object a line."""
    path.write_text("".join(json.dumps({"prompt": p, "label": a}) + "\n" for p, a in rows), encoding="utf-8")


def main(folder: pathlib.Path) -> None:
    """Write tiny/tokenizer*, sums/*.jsonl, confidence/*.jsonl and additions/*.jsonl below `folder`."""
    draw = random.Random(SEED)
    rows = [(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(rows)
    held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
    warmup = [(prompt, corrupt(answer, draw)) for _ in range(COPIES) for prompt, answer in train]
    chats = chat(draw)
    for name in ("tiny", "sums", "confidence", "additions"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write(folder / "sums" / "train.jsonl", train)
    write(folder / "sums" / "heldout.jsonl", held_out)
    write(folder / "sums" / "warmup.jsonl", warmup)
    write(folder / "confidence" / "warmup.jsonl", confident(train[:CONFIDENT], draw))
    write(folder / "additions" / "heldout.jsonl", chats[:CHAT_HELD_OUT])
    write(folder / "additions" / "train.jsonl", chats[CHAT_HELD_OUT:])
    character_tokenizer(CHARACTERS, folder / "tiny")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else BUILTIN)
