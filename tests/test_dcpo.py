"""dcpo: statements of confidence, where they begin among the tokens, advantages and metrics by hand."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import sys
import tempfile
import time
import types

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_tokenizer import build

from rljax import algorithms
from rljax import tokenizer as tk
from rljax.algorithms import dcpo
from rljax.rewards import dcpo as dcpo_reward
from rljax.rewards.dcpo import parse_confidence
from rljax.sample import Sample

ALGO = types.SimpleNamespace(normalize_std=True, dcpo_calibration_weight=0.5, dcpo_calibration_scale=1.0,
                             dcpo_hybrid_alpha=0.5)
PLAIN = types.SimpleNamespace(**{**vars(ALGO), "normalize_std": False})


# statements of confidence


@pytest.mark.parametrize("text,found", [
    ("85\nCONFIDENCE: 0.4", (3, 0.4)),
    ("CONFIDENCE: 0.85.", (0, 0.85)),
    ("CONFIDENCE: 1.", (0, 1.0)),
    ("CONFIDENCE: 1.000", (0, 1.0)),
    ("CONFIDENCE:.5", (0, 0.5)),
    ("confidence : 0", (0, 0.0)),
    ("x **Confidence:** 0.7 \r\nbye", (2, 0.7)),
    ("**CONFIDENCE: 0.7**", (0, 0.7)),
    ("**CONFIDENCE**: **0.7**.", (0, 0.7)),
    ("so 5. CONFIDENCE: 0.25\n", (6, 0.25)),
    ("CONFIDENCE: 0.1\nCONFIDENCE: 0.9", (16, 0.9)),
    ("CONFIDENCE: 0.1\nCONFIDENCE: <0..1>", (0, 0.1)),
    ("CONFIDENCE: 0.1\nCONFIDENCE: 2", (0, 0.1)),
    ("CONFIDENCE: CONFIDENCE: 0.3", (12, 0.3)),
])
def test_statements(text, found):
    assert parse_confidence(text) == found


NO_NUMBERS = [
    "", "10", "1x", "x1", "0.8.5", "1e1", "0.5e-1", "-0.5", "+0.5", "50%", "0.5%", "0.5 %", "1.5", "1.01", "nan", "inf",
    "1/2", "1 / 2", "0,8", "0 to 1", "0..", "0.8 0.9", "00.5", "01", "\n0.5", "0x1", "\u0660.\u0665", "0.\u0665",
    "1_0", "<0.5>", ".",
]  # fmt: skip


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_what_is_no_number(number):
    assert parse_confidence(f"CONFIDENCE: {number}") is None


@pytest.mark.parametrize("text", ["", "0.5", "CONFIDENCE 0.5", "overconfidence: 0.5", "my_confidence: 0.5",
                                  "confidences: 0.5", "conf\u0131dence: 0.5", "CONFIDENCE = 0.5"])
def test_what_is_no_keyword(text):
    assert parse_confidence(text) is None


PIECES = st.lists(st.sampled_from(["CONFIDENCE", "confidence:", ":", "*", " ", "\n", "0", "1", ".", "0.5", "9", "\r"]))


@given(st.one_of(st.text(), PIECES.map("".join)))
def test_the_parser_is_total(text):
    found = parse_confidence(text)
    if found is not None:
        start, value = found
        assert 0 <= value <= 1
        assert text[start:].lstrip("*")[:10].lower() == "confidence"
        assert parse_confidence(text[start:]) == (0, value)


@given(st.text(), st.integers(0, 100))
def test_a_last_line_is_always_found(text, hundredths):
    start, value = parse_confidence(f"{text}\nCONFIDENCE: {hundredths / 100}")
    assert (start, value) == (len(text) + 1, hundredths / 100)


@pytest.mark.parametrize("piece", ["confidence: ", "*", "confidence:*** 0.", "0", " ", "confidence: 0.5*.* x"])
def test_the_parser_takes_linear_time(piece):
    begin = time.perf_counter()
    for head in ("", "confidence:", "confidence: 0."):
        parse_confidence(head + piece * 200_000 + "x")
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize("text,label,right", [
    ("85\nCONFIDENCE: 0.4", "85", 1.0),
    ("84\nCONFIDENCE: 0.4", "85", 0.0),
    ("85\nCONFIDENCE: 0.4\nCONFIDENCE: 0.9", "85", 0.0),  # the first one is now the last number of the answer
    ("85\nCONFIDENCE: 1", "1", 0.0),
    ("85", "85", 1.0),
    ("", "85", 0.0),
])
def test_the_grade_is_of_the_text_before(text, label, right):
    assert dcpo_reward.reward(Sample(text=text, label=label)) == right


# the border


@functools.cache
def byte_tokenizer():
    folder = pathlib.Path(tempfile.mkdtemp())
    return tk.load(build(folder, words=["\u0120CON", "CONFID", "ENCE", "the", "0."]))


@given(st.text(max_size=12), st.lists(st.integers(0, 300), max_size=4), st.randoms(use_true_random=False))
def test_the_border_against_every_prefix(text, noise, draw):
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text) + [i % tokenizer.vocab_size for i in noise] + tokenizer.encode("\nCONFIDENCE: 0.5")
    tokens.insert(draw.randrange(len(tokens) + 1), min(tokenizer.stop_ids))
    decoded = tokenizer.decode(tokens)
    start = draw.randrange(len(decoded))
    assume(decoded[start] != "\ufffd")
    # A prefix's character counts once the bytes are complete, so that its end is no replacement character.
    reach = [len(tokenizer.decode(tokens[:n]).rstrip("\ufffd")) for n in range(len(tokens) + 1)]
    assert reach == sorted(reach)
    expected = next(n for n, length in enumerate(reach) if length > start) - 1
    assert dcpo.border(tokenizer, tokens, decoded, start) == expected
    assert dcpo.border(tokenizer, tokens, decoded[: start + 1], start) == expected


def test_the_border_inside_a_token_and_after_half_characters():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("\u20ac CONFIDENCE: 0.5")
    text = tokenizer.decode(tokens)
    start, _ = parse_confidence(text)
    assert (start, dcpo.border(tokenizer, tokens, text, start)) == (2, 3)  # three bytes of the euro, then " CON"
    assert tokenizer.decode(tokens[3:4]) == " CON"
    assert dcpo.border(tokenizer, tokens, text, 0) == 2  # its last byte makes the character


def test_the_border_with_special_tokens_in_the_text():
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer.encode("5 "), min(tokenizer.stop_ids), *tokenizer.encode("CONFIDENCE: 1")]
    for skip in (True, False):
        text = tokenizer.decode(tokens, skip)
        assert dcpo.border(tokenizer, tokens, text, text.index("CONF")) == 3


def test_the_drawn_tokens_count_and_not_those_of_the_tokenizer():
    tokenizer = byte_tokenizer()
    letters = [tokenizer.encode(letter)[0] for letter in "7 CONFIDENCE: 0.5"]
    assert len(tokenizer.encode("7 CONFIDENCE: 0.5")) < len(letters)
    assert dcpo.border(tokenizer, letters, "7 CONFIDENCE: 0.5", 2) == 2


def test_another_text_than_the_tokens_is_refused():
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="is not what its 1 response tokens decode to"):
        dcpo.border(tokenizer, tokenizer.encode("a"), "b", 0)


# post-processing


def test_post_process():
    config = types.SimpleNamespace(model=types.SimpleNamespace(path="tiny", chat_template_kwargs="{}"))
    tokenizer = tk.load("tiny")
    texts, rewards = ["85\nCONFIDENCE: 0.4", "85", "8\nCONFIDENCE: 0.9"], [1.0, 0.5, None]
    rows = [Sample(text=t, response_tokens=tokenizer.encode(t) + [1], reward=r)
            for t, r in zip(texts, rewards, strict=True)]
    dcpo.post_process(rows, config)
    assert [row.train_metadata["dcpo"] for row in rows] == [
        {"confidence": 0.4, "border": 3, "accuracy": 1.0},
        {"confidence": None, "border": None, "accuracy": 0.0},
        {"confidence": 0.9, "border": 2, "accuracy": None},
    ]
    before = dcpo._tokenizer.cache_info().hits
    dcpo.post_process(rows, config)
    assert dcpo._tokenizer.cache_info().hits == before + 1


# advantages


def test_spread():
    values = dcpo.spread([1] * 500, 493, 0.5, -0.3, 1.0)
    assert values.dtype == np.float32 and values.shape == (500,)
    np.testing.assert_array_equal(values, np.float32([0.5] * 493 + [0.3] * 7))
    np.testing.assert_array_equal(dcpo.spread([1, 0, 1, 1, 0, 1], 3, 2.0, 1.0, 0.25), [2, 0, 2, -0.25, 0, -0.25])
    np.testing.assert_array_equal(dcpo.spread([1, 1], 0, 2.0, 1.0, 1.0), [-1, -1])


def test_spread_without_a_statement():
    np.testing.assert_array_equal(dcpo.spread([1, 0, 1, 1, 0], None, 2.0, 1.0, 0.5), [2, 0, 2, -0.5, 0])
    np.testing.assert_array_equal(dcpo.spread([0, 0], None, 2.0, 1.0, 1.0), [0, 0])
    assert dcpo.spread([], None, 2.0, 1.0, 1.0).shape == (0,)


def row(uid, group, accuracy, confidence, border, length=3):
    found = {"accuracy": accuracy, "confidence": confidence, "border": border}
    return Sample(uid=uid, group=group, reward=accuracy, response_tokens=[5] * length, loss_mask=[1] * length,
                  train_metadata={"dcpo": found})


def test_calibration_errors():
    accuracy, groups = np.asarray([1.0, 0.0, 0.0, 1.0]), np.asarray([4, 9, 4, 9])
    found = dcpo.calibration_errors(accuracy, [0.75, 0.25, None, 0.25], groups, 0.5, 0.5)
    # targets 0.75, 0.25, 0.25, 0.75
    np.testing.assert_allclose(found, [0, 0, 0.625, 0.125])
    found = dcpo.calibration_errors(accuracy, [0.5, 0.5, 0.5, 0.0], groups, 2.0, 1.0)
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5, 2.0])


def test_advantages_by_hand():
    rows = [row(0, 1, 1.0, 0.75, 1), row(1, 1, 0.0, 0.25, 2), row(2, 1, 0.0, None, None), row(3, 1, 1.0, 0.25, 0)]
    # mean accuracy 0.5; errors 0.5 * [0, 0, 1.25, 0.25] = [0, 0, 0.625, 0.125], mean 0.1875
    found = dcpo.advantages(rows, PLAIN, [{}] * 4)
    np.testing.assert_allclose(found, [[0.5, 0.1875, 0.1875], [-0.5, -0.5, 0.1875], [-0.5, -0.5, -0.4375],
                                       [0.0625, 0.0625, 0.0625]])
    assert all(values.dtype == np.float32 for values in found)
    half = types.SimpleNamespace(**{**vars(PLAIN), "dcpo_calibration_scale": 0.5})
    np.testing.assert_allclose(dcpo.advantages(rows, half, [{}] * 4)[2], [-0.5, -0.5, -0.21875])
    # with deviations: accuracy's is sqrt(1/3), the errors' sqrt((2 * 0.1875^2 + 0.4375^2 + 0.0625^2) / 3) = 0.2976
    found = dcpo.advantages(rows, ALGO, [{}] * 4)
    np.testing.assert_allclose(found[0], [0.866025, 0.630126, 0.630126], rtol=1e-4)
    np.testing.assert_allclose(found[2], [-0.866025, -0.866025, -1.470293], rtol=1e-4)


def test_a_group_that_is_always_right_learns_its_confidence_only():
    found = dcpo.advantages([row(0, 1, 1.0, 1.0, 1), row(1, 1, 1.0, 0.5, 1), row(2, 2, 1.0, 0.5, 1)], PLAIN, [{}] * 3)
    np.testing.assert_allclose(found, [[0, 0.0625, 0.0625], [0, -0.0625, -0.0625], [0, 0, 0]])


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="sample 7 .*reward.post_process was replaced"):
        dcpo.advantages([Sample(uid=7, group=0, reward=1.0)], ALGO, [{}])
    with pytest.raises(ValueError, match="not finite"):
        dcpo.advantages([row(0, 0, None, 0.5, 1)], ALGO, [{}])


def test_it_is_found_by_name():
    assert algorithms.find("dcpo") is dcpo.advantages


# metrics


def test_reliability_and_expected_calibration_error():
    confidence, accuracy = [0.0, 0.05, 0.1, 0.95, 1.0, 0.3], [0, 1, 0, 1, 1, 0]
    count, stated, right = dcpo.reliability(confidence, accuracy)
    np.testing.assert_array_equal(count, [2, 1, 0, 1, 0, 0, 0, 0, 0, 2])
    np.testing.assert_allclose(stated, [0.025, 0.1, np.nan, 0.3, *[np.nan] * 5, 0.975])
    np.testing.assert_allclose(right, [0.5, 0, np.nan, 0, *[np.nan] * 5, 1])
    # (2 * 0.475 + 0.1 + 0.3 + 2 * 0.025) / 6
    assert dcpo.expected_calibration_error(confidence, accuracy) == pytest.approx(1.4 / 6)
    assert dcpo.expected_calibration_error([0.25, 0.75], [0, 1], bins=1) == 0
    tenths = [float(f"0.{i}") for i in range(10)]
    np.testing.assert_array_equal(dcpo.reliability(tenths, tenths)[0], [1] * 10)


@pytest.mark.parametrize("confidence,accuracy,message", [([0.5], [1, 0], "both must be"), ([1.5], [1], "all must be"),
                                                         ([], [], "no stated")])
def test_metrics_that_have_no_value_raise(confidence, accuracy, message):
    with pytest.raises(ValueError, match=message):
        dcpo.expected_calibration_error(confidence, accuracy)


def test_summary():
    rows = [row(0, 0, 1.0, 0.8, 1), row(1, 0, 0.0, 0.6, 1), row(2, 0, 1.0, None, None), row(3, 0, None, 0.1, 1)]
    found = dcpo.summary(rows)
    assert sorted(found) == [f"dcpo/{n}" for n in ("brier", "calibration_error", "confidence", "ece",
                                                  "missing_confidence")]
    assert found["dcpo/confidence"] == pytest.approx(0.7)
    assert found["dcpo/calibration_error"] == pytest.approx(0.4)
    assert found["dcpo/brier"] == pytest.approx(0.2)
    assert found["dcpo/ece"] == pytest.approx(0.4)
    assert found["dcpo/missing_confidence"] == pytest.approx(1 / 3)
    assert dcpo.summary([row(0, 0, 1.0, None, None)]) == {"dcpo/missing_confidence": 1.0}
    assert dcpo.summary(rows[3:]) == {} and dcpo.summary([]) == {}


def test_the_benchmark_compares_evaluations_of_equal_accuracy():
    path = pathlib.Path(__file__).parent / "benchmarks" / "calibration.py"
    spec = importlib.util.spec_from_file_location("calibration", path)
    module = sys.modules["calibration"] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    rows = [{"rollout/step": 0}, *({"eval/step": step, "eval/sums": value, "eval/sums/dcpo/ece": 0.25}
                                   for step, value in ((0, 0.5), (5, 0.35), (10, 0.625), (15, 0.75), (20, 0.95)))]
    left = module.evaluations(rows, "sums")
    right = [dataclasses.replace(one, step=one.step + 1, values={**one.values, "accuracy": one.accuracy + 1 / 64})
             for one in left]
    assert [one.step for one in left] == [0, 5, 10, 15, 20] and left[1].values["ECE"] == 0.25
    # 0.5 is before training, 0.35 and 0.95 are outside; of the equally near ones the later comes first
    assert [(one.step, other.step) for one, other in module.matched(left, right)] == [(15, 16), (10, 11)]
    assert module.matched(left, right[:2]) == []
    assert "| 3 | grpo | 10 | 0.625 | 0.250 | - | - | - |" in module.table([(3, "grpo", left[2])])
