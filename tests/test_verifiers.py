"""Verifiers beside mathematics: f1, dapo, random, remote over loopback, groups, and a row's own type."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from rljax import records, rewards
from rljax.rewards import dapo, f1, random, remote
from rljax.rewards.pool import RewardPool
from rljax.sample import Sample


def said(text, label=None, uid=0, **metadata):
    return Sample(uid=uid, group=0, text=text, label=label, metadata=metadata)


@pytest.mark.parametrize(("text", "label", "value"), [
    ("Paris", "paris", 1), ("The city of Paris.", "Paris, city", 0.8), ("x", "y", 0), ("", "y", 0), ("the", "a", 1),
    ("I think <answer>red red</answer>", "red", 2 / 3), (r"so \boxed{blue sky}", "sky", 2 / 3),
    ("blue", ["red", "blue"], 1), ("42", 42, 1),
])  # fmt: skip
def test_f1(text, label, value):
    assert f1.reward(said(text, label)) == pytest.approx(value)


@pytest.mark.parametrize(("text", "right"), [
    ("Answer: 34", True), ("answer : $34$ ", True), ("Answer: 33\nAnswer: **34**", True), ("The answer is 34", False),
    ("Answer: 34" + " " * 300 + "x", False), ("Answer: \\frac{68}{2}", True), ("", False),
])  # fmt: skip
def test_dapo(text, right):
    assert dapo.reward(said(text, "34")) == {"reward": 1.0 if right else -1.0, "acc": float(right)}


def test_random_is_even_and_fixed():
    drawn = [random.reward(said("", uid=uid)) for uid in range(2000)]
    assert 900 < sum(drawn) < 1100 and drawn == [random.reward(said("", uid=uid)) for uid in range(2000)]


@pytest.fixture
def server():
    """Answers by the response's text; `seen` holds what was asked."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(asked)
            text = asked["response"]
            busy = text == "down" or (text == "busy" and sum(one == asked for one in seen) < 3)
            self.send_response(503 if busy else 404 if text == "lost" else 200)
            self.end_headers()
            answer = {"number": 0.5, "parts": {"score": 0.25, "style": 1, "note": "x"}, "text": "high"}
            self.wfile.write(json.dumps(answer.get(text, 1)).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}/score", seen
        made.shutdown()


def test_remote(server, monkeypatch):
    url, seen = server
    monkeypatch.setattr(remote, "PAUSES_S", (0.01, 0.01, 0.01))
    monkeypatch.setenv(remote.URL, url)
    assert remote.reward(said("number", "7", hint=3)) == 0.5
    assert seen[0] == {"prompt": "", "response": "number", "label": "7", "metadata": {"hint": 3}}
    assert remote.reward(said("parts")) == {"reward": 0.25, "style": 1}
    assert remote.reward(said("busy")) == 1 and len(seen) == 5  # two refusals, then an answer
    with pytest.raises(OSError, match="503"):
        remote.reward(said("down"))
    assert len(seen) == 9
    with pytest.raises(OSError, match="404"):
        remote.reward(said("lost"))
    assert len(seen) == 10
    monkeypatch.setenv(remote.URL, "http://127.0.0.1:9/")
    with pytest.raises(OSError):
        remote.reward(said("number"))


def test_the_pool_hands_the_address_on_and_a_row_may_name_its_own_type(server):
    url, _ = server
    with RewardPool("remote", workers=1, timeout_s=20, fallback=-1.0, url=url) as pool:
        futures = [pool.submit(one) for one in (
            said("parts"), said("text"), said("4", "4", rm_type="exact_match"), said("4", "4", rm_type="no_such"))]
        results = [future.result(60) for future in futures]
    assert [one.reward for one in results] == [0.25, -1.0, 1.0, -1.0]
    assert results[0].parts == {"reward": 0.25, "style": 1.0}
    assert "str" in results[1].error and "no reward 'no_such'" in results[3].error and pool.errors == 2


@pytest.mark.slow
def test_reasoning_gym():
    """Its prompts with its verifiers, an extra."""
    pytest.importorskip("reasoning_gym")
    keys = records.Keys("prompt", "label", "metadata", "tools")
    rows, mark = records.read("reasoning_gym:leg_counting?size=6&seed=3@[1:4]", keys)
    again, same = records.read("reasoning_gym:leg_counting?size=6&seed=3@[1:4]", keys)
    assert rows == again and mark == same and len(rows) == 3 and rows[0][0].endswith("entry 1")
    row = keys.row(*rows[0])
    assert "legs" in row.prompt and row.label.isdigit()
    for text, value in ((f"<think>3</think>so <answer>{row.label}</answer>.", 1.0), (row.label, 1.0), ("none", 0.0)):
        sample = said(text, row.label, **row.metadata)
        assert rewards.find("reasoning_gym")(sample) == pytest.approx(value, abs=0.02)
    for bad, words in (("nope", "nope"), ("leg_counting?sz=3", "sz"), ("leg_counting?size=x", "leg_counting")):
        with pytest.raises(ValueError, match=words):
            records.read(f"reasoning_gym:{bad}", keys)
    with pytest.raises(ValueError, match="reasoning_gym:TASK"):
        rewards.find("reasoning_gym")(said("3"))


GROUPS = """
def ranked(samples):
    order = sorted(len(s.text) for s in samples)
    return [{"reward": order.index(len(s.text)), "length": len(s.text)} for s in samples]

def short(samples):
    return [1.0]

def broken(samples):
    raise KeyError("x")
"""


def test_groups_are_scored_together(tmp_path, monkeypatch):
    (tmp_path / "group_rewards.py").write_text(GROUPS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    group = [said("aaa"), said("a"), said("aa")]
    with RewardPool("group_rewards:ranked", workers=1) as pool:
        found = pool.submit_group(group).result(60)
    assert [one.reward for one in found] == [2, 0, 1] and found[0].parts == {"reward": 2.0, "length": 3.0}
    for name, words in (("short", "group of 3 samples"), ("broken", "KeyError")):
        with RewardPool(f"group_rewards:{name}", workers=1, fallback=-2.0) as pool:
            found = pool.submit_group(group).result(60)
        assert [one.reward for one in found] == [-2.0] * 3 and words in found[0].error and pool.errors == 3
