"""data.py: reading rows, rendering and the length filter, the order of epochs, resuming."""

from __future__ import annotations

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import cases, shared
from test_tokenizer import build

from rljax import data, records, hub
from rljax import tokenizer as tk

CASES = {case["id"]: case for area in ("data", "checkpoint", "sampler") for case in cases(area)}


def case(name):
    """Parametrise over one case; skipped where the case files are missing."""
    return pytest.mark.parametrize("case", [CASES[name]] if name in CASES else [], ids=[name] if name in CASES else [])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Any text, one token per byte, no template."""
    return tk.load(build(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """One token per word, and a template that adds two."""
    folder = tmp_path_factory.mktemp("words")
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<user>", "<bot>", "one", "two", "three", "four", "five"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    template = ("{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
                "{% if tools %}{{ tools | length }} tools {% endif %}<bot>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "chat_template": template}))
    return tk.load(folder)


def write(path, rows):
    """Rows as JSONL, or as they are if they are bytes."""
    path.write_bytes(rows if isinstance(rows, bytes) else b"".join(json.dumps(r).encode() + b"\n" for r in rows))
    return str(path)


def source(path, tokenizer, **settings_):
    return data.PromptSource(path, tokenizer, **{"max_prompt_len": 10_000, "shuffle": False, **settings_})


def prompts(samples):
    return [sample.prompt for sample in samples]


@pytest.fixture(scope="module")
def rows100(tmp_path_factory):
    """A file of prompts p0 ... p99."""
    return write(tmp_path_factory.mktemp("rows") / "d.jsonl", [{"prompt": f"p{i}", "label": i} for i in range(100)])


# JSONL


@case("DAT-005")
def test_label_types_of_a_case(tmp_path, text, case):
    path = write(tmp_path / "d.jsonl", "\n".join(case["input"]["lines"]).encode())
    made = source(path, text)
    assert made.num_rows == case["expected"]["rows"]
    labels = [sample.label for sample in made.take(made.num_rows)]
    assert labels == case["expected"]["labels"]
    assert [type(x) for x in labels] == [type(x) for x in case["expected"]["labels"]]


@case("DAT-006b")
def test_separators_of_a_case(tmp_path, text, case):
    made = source(write(tmp_path / "d.jsonl", bytes.fromhex(case["input"]["bytes_hex"])), text)
    samples = made.take(made.num_rows)
    assert made.num_rows == case["expected"]["rows"]
    assert [s.label for s in samples] == case["expected"]["labels"]
    assert prompts(samples) == case["expected"]["prompts"]


@case("DAT-007")
def test_number_labels_reach_the_reward_as_they_stand(tmp_path, text, case):
    rows = [{"prompt": "x", "label": label} for label in case["input"]["labels"]]
    labels = [s.label for s in source(write(tmp_path / "d.jsonl", rows), text).take(3)]
    assert labels == case["input"]["labels"] and [type(x) for x in labels] == [int, float, str]


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) |
                    st.text(), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
                    max_leaves=4)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.text(min_size=1), JSON), min_size=1, max_size=5), ends=st.lists(
    st.sampled_from(["\n", "\r\n", "\n\n", " \t\r\n \n"]), min_size=5, max_size=5), bom=st.booleans(),
    ascii_=st.booleans(), last=st.booleans())
def test_any_json_comes_back(tmp_path_factory, text, rows, ends, bom, ascii_, last):
    """Any strings and labels, any blank lines and line ends; with or without a byte-order mark and a last newline."""
    lines = [json.dumps({"prompt": prompt, "label": label}, ensure_ascii=ascii_) + end
             for (prompt, label), end in zip(rows, ends, strict=False)]
    content = "".join(lines) if last else "".join(lines).rstrip("\r\n \t")
    path = tmp_path_factory.mktemp("any") / "d.jsonl"
    samples = source(write(path, (b"\xef\xbb\xbf" if bom else b"") + content.encode()), text).take(len(rows))
    assert [(s.prompt, s.label) for s in samples] == rows
    assert all(text.decode(s.prompt_tokens, skip_special=False) == s.prompt for s in samples)


@pytest.mark.parametrize("line, message", [
    (b"{'prompt': 1}", "line 3: not JSON"),
    (b'{"prompt": "a"', "line 3: not JSON"),
    (b'{"prompt": "a", "label": 1} {}', "line 3: not JSON: Extra data"),
    (b'{"prompt": "a", "label": NaN}', "line 3: not JSON: NaN is no JSON value"),
    (b'{"prompt": "a", "label": -Infinity}', "line 3: not JSON: -Infinity is no JSON"),
    (b'{"prompt": "\xff"}', "line 3: not UTF-8 at byte 12"),
    (b'\xef\xbb\xbf{"prompt": "a", "label": 1}', "line 3: not JSON"),
    (b"[" * 100_000, "line 3: not JSON"),
    (b'["a", 1]', "line 3: a row must be an object with keys, not a list"),
    (b"3", "line 3: a row must be an object with keys, not a number"),
    (b'{"text": "a", "label": 1}', r"line 3: no key 'prompt'; the row has 'text', 'label' \(name one with data.input_"),
    (b'{"prompt": "a", "answer": 1}', "line 3: no key 'label'; the row has 'prompt', 'answer' .*data.label_key=''"),
    (b"{}", "line 3: no key 'prompt'; the row has no keys"),
    (b'{"prompt": null, "label": 1}', "line 3: 'prompt' must be text or a list of chat messages, not null"),
    (b'{"prompt": 7, "label": 1}', "line 3: 'prompt' must be text .* not a number"),
    (b'{"prompt": [], "label": 1}', "line 3: 'prompt' must be text .* not an empty list"),
    (b'{"prompt": ["hi"], "label": 1}', "line 3: message 0 of 'prompt' must be an object with 'role' and 'content'"),
    (b'{"prompt": [{"role": "user"}], "label": 1}', "line 3: message 0 of 'prompt'"),
    (b'{"prompt": [{"role": "user", "content": "a"}], "label": 1}', "line 3: the prompt is a list of .* no chat templ"),
    (b'{"prompt": "", "label": 1}', "line 3: the prompt '' has no tokens"),
    (b'{"prompt": "\\ud800", "label": 1}', "line 3: half a surrogate pair at character 0"),
    (b'{"prompt": "a", "label": 1, "metadata": 5}', "line 3: 'metadata' must be an object, not a number"),
    (b'{"prompt": "a", "label": 1, "metadata": "{"}', "line 3: 'metadata' is text but not JSON"),
    (b'{"prompt": "a", "label": 1, "tools": {}}', "line 3: 'tools' must be a list, not an object"),
])
def test_a_bad_line_is_named(tmp_path, text, line, message):
    path = write(tmp_path / "d.jsonl", b'{"prompt": "ok", "label": 1}\n\n' + line + b'\n{"prompt": "ok", "label": 1}\n')
    with pytest.raises(ValueError, match="d.jsonl, " + message):
        source(path, text)


@pytest.mark.parametrize("path, message", [
    ("missing.jsonl", "no such file or folder, and no hub data set"),
    ("/nowhere/x/y.parquet", "no such file or folder"),
    ("builtin:nothing/here.jsonl", "not in the package"),
    (".", "no file there ends in .jsonl, .parquet, .arrow"),
])
def test_missing_files(text, path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        source(path, text)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n \r\n"])
def test_empty_file(tmp_path, text, content):
    with pytest.raises(ValueError, match="no rows in .*d.jsonl"):
        source(write(tmp_path / "d.jsonl", content), text)


def test_unknown_character_names_the_line(tmp_path):
    tk.character_tokenizer("12+=", tmp_path)
    path = write(tmp_path / "d.jsonl", [{"prompt": "1+1=", "label": 2}, {"prompt": "1-1=", "label": 0}])
    with pytest.raises(ValueError, match=r"line 2: the character tokenizer .* has no id for '-'"):
        source(path, tk.load(tmp_path))


def test_builtin_paths(tmp_path, text, monkeypatch):
    monkeypatch.setattr(hub, "BUILTIN", tmp_path)
    (tmp_path / "sums").mkdir()
    write(tmp_path / "sums" / "train.jsonl", [{"prompt": f"{i}", "label": i} for i in range(5)])
    assert prompts(source("builtin:sums/train.jsonl@[1:3]", text).take(2)) == ["1", "2"]
    with pytest.raises(ValueError, match="which has builtin:sums/train.jsonl"):
        source("builtin:sums/test.jsonl", text)


# metadata, tools, keys


def test_metadata_and_tools(tmp_path, words):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    rows = [{"q": "one", "a": 1, "metadata": {"rm_type": "math"}, "tools": [tool]},
            {"q": "two", "a": 2, "metadata": '{"x": [1]}', "tools": json.dumps([tool, tool])},
            {"q": "three", "a": 3, "metadata": None, "tools": None},
            {"q": "four", "a": 4, "metadata": "", "tools": []}]
    made = source(write(tmp_path / "d.jsonl", rows), words, input_key="q", label_key="a")
    first, second, third, fourth = made.take(4)
    assert first.metadata == {"rm_type": "math", "tools": [tool]}
    assert second.metadata == {"x": [1], "tools": [tool, tool]}
    assert third.metadata == fourth.metadata == {}
    assert first.prompt_tokens == [1, 3, 0, 0, 2] and third.prompt_tokens == [1, 5, 2]  # "1 tools" is two unknown words


def test_samples_share_nothing(tmp_path, text):
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "label": [1], "metadata": {"n": []}}])
    made = source(path, text)
    [first] = made.take(1)
    first.label.append(2), first.metadata["n"].append(1), first.prompt_tokens.append(9)
    [again] = made.take(1)
    assert (again.label, again.metadata, len(again.prompt_tokens)) == ([1], {"n": []}, 1)
    again.check()


def test_no_labels(tmp_path, text):
    assert source(write(tmp_path / "d.jsonl", [{"prompt": "a"}]), text, label_key="").take(1)[0].label is None


# rendering and the length filter


@case("DAT-011b")
def test_length_counts_the_template(tmp_path, words, case, caplog):
    path = write(tmp_path / "d.jsonl", case["input"]["rows"])
    made = source(path, words, label_key="", max_prompt_len=case["input"]["max_prompt_len"])
    assert (made.num_rows, made.dropped) == (case["expected"]["kept"], case["expected"]["dropped_counted"])
    [sample] = made.take(1)
    assert len(sample.prompt_tokens) == len(sample.prompt.split()) + case["input"]["template_adds"]
    assert caplog.text.count("dropped 1 of 2 prompts that are longer than max_prompt_len 4") == 1
    without = source(path, words, label_key="", max_prompt_len=5, chat_template=False)
    assert (without.num_rows, without.dropped) == (2, 0)


@case("SMP-021")
def test_a_long_prompt_is_dropped_before_the_run(tmp_path, words, case):
    limit, length = case["input"]["max_prompt_len"], case["input"]["rendered_prompt_len"]
    rows = [{"prompt": " ".join(["one"] * (length - 2))}, {"prompt": " ".join(["two"] * (limit - 2))}]
    made = source(write(tmp_path / "d.jsonl", rows), words, label_key="", max_prompt_len=limit)
    assert (made.num_rows, made.dropped) == (1, 1)
    assert len(made.take(1)[0].prompt_tokens) == limit


def test_nothing_left_names_both_numbers(tmp_path, words):
    path = write(tmp_path / "d.jsonl", [{"prompt": "one two three", "label": 1}, {"prompt": "one two", "label": 1}])
    with pytest.raises(ValueError, match="all 2 prompts are longer than max_prompt_len 3 tokens: the shortest has 4"):
        source(path, words, max_prompt_len=3)
    with pytest.raises(ValueError, match="max_prompt_len 0 is below 1"):
        source(path, words, max_prompt_len=0)


def test_chat_messages(tmp_path, words):
    chat = [{"role": "user", "content": "one"}, {"role": "bot", "content": "two"}, {"role": "user", "content": "five"}]
    path = write(tmp_path / "d.jsonl", [{"prompt": chat, "label": 1}])
    [sample] = source(path, words).take(1)
    assert sample.prompt == chat
    assert sample.prompt_tokens == [1, 3, 2, 4, 1, 7, 2]
    with pytest.raises(ValueError, match="line 1: the prompt is a list of chat messages, but model.chat_template is F"):
        source(path, words, chat_template=False)


@pytest.mark.parametrize("name, keys", [("gsm8k_test", {"input_key": "question", "label_key": "answer"}),
                                        ("math500", {})])
def test_real_prompts_unchanged(words, name, keys):
    path = shared("data", f"{name}.jsonl")
    made = source(str(path), words, max_prompt_len=1500, **keys)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    assert made.num_rows == len(rows) and made.dropped == 0
    sample = made.take(1)[0]
    assert sample.prompt == rows[0][keys.get("input_key", "prompt")]
    assert sample.label == rows[0][keys.get("label_key", "label")]


# slices


@settings(max_examples=60, deadline=None)
@given(begin=st.none() | st.integers(-130, 130), end=st.none() | st.integers(-130, 130))
def test_slices_are_pythons(rows100, text, begin, end):
    shown = f"@[{'' if begin is None else begin}:{'' if end is None else end}]"
    expected = [f"p{i}" for i in range(100)][begin:end]
    if expected:
        made = source(rows100 + shown, text)
        assert prompts(made.take(made.num_rows)) == expected
    else:
        with pytest.raises(ValueError, match="the slice takes none of the 100 rows"):
            source(rows100 + shown, text)


@pytest.mark.parametrize("bad", ["@[1]", "@[a:b]", "@[1:2:3]", "@[1:2", "@[-:2]", "@[1.5:]", "@[:2]x"])
def test_bad_slices(rows100, text, bad):
    with pytest.raises(ValueError, match=r"a slice is written path@\[a:b\]"):
        source(rows100 + bad, text)


# Parquet, Arrow, folders, hub


def test_parquet(tmp_path, words):
    rows = [{"prompt": [{"role": "user", "content": "one", "name": None}], "label": 1.5, "metadata": {"a": [1, 2]}},
            {"prompt": [{"role": "user", "content": "two", "name": "x"}], "label": None, "metadata": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    made = source(str(tmp_path / "d.parquet"), words)
    first, second = made.take(2)
    assert first.prompt == [{"role": "user", "content": "one"}] and first.prompt_tokens == [1, 3, 2]
    assert second.prompt[0]["name"] == "x"
    assert (first.label, second.label, first.metadata, second.metadata) == (1.5, None, {"a": [1, 2]}, {})
    json.dumps(first.to_json())
    assert prompts(source(f"{tmp_path / 'd.parquet'}@[-1:]", words).take(1)) == [second.prompt]


def test_parquet_errors(tmp_path, text):
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match="d.parquet: cannot be read"):
        source(str(path), text)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"question": "a", "answer": "b"}]), path)
    with pytest.raises(ValueError, match="d.parquet, row 1: no key 'prompt'; the row has 'question', 'answer'"):
        source(str(path), text)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", "label": b"\x00"}]), path)
    with pytest.raises(ValueError, match="d.parquet, row 1: 'label' holds bytes"):
        source(str(path), text)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(ValueError, match="no rows in .*d.parquet"):
        source(str(path), text)


@pytest.mark.parametrize("writer", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_arrow(tmp_path, text, writer):
    table = pyarrow.Table.from_pylist([{"prompt": "a", "label": 1}, {"prompt": "b", "label": 2}])
    with writer(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as sink:
        sink.write_table(table)
    assert [s.label for s in source(str(tmp_path), text).take(2)] == [1, 2]


def row(prompt):
    return [{"prompt": prompt, "label": 0}]


def test_folder_takes_the_training_shards_in_order(tmp_path, text):
    for i in (1, 0):
        table = pyarrow.Table.from_pylist(row(f"t{i}"))
        pyarrow.parquet.write_table(table, tmp_path / f"train-0000{i}-of-00002.parquet")
    write(tmp_path / "test.jsonl", row("test"))
    (tmp_path / "README.md").write_text("about")
    assert prompts(source(str(tmp_path), text).take(2)) == ["t0", "t1"]
    assert prompts(source(str(tmp_path / "test.jsonl"), text).take(1)) == ["test"]


def test_folder_that_leaves_a_choice(tmp_path, text):
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", row(name))
    with pytest.raises(ValueError, match="has several data sets .*main.*socratic"):
        source(str(tmp_path), text)
    assert prompts(source(str(tmp_path / "main"), text).take(1)) == ["main"]
    (tmp_path / "s").mkdir()
    write(tmp_path / "s" / "test.jsonl", row("a")), write(tmp_path / "s" / "validation.jsonl", row("b"))
    with pytest.raises(ValueError, match=r"several splits \(test, validation\)"):
        source(str(tmp_path / "s"), text)


def hub_folder(tmp_path, monkeypatch):
    """A fake hub that 'downloads' a folder; the calls it got."""
    calls = []
    for name in ("main/train-00000-of-00001", "main/test-00000-of-00001", "socratic/train-00000-of-00001"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(row(name)), tmp_path / f"{name}.parquet")

    def download(repo, **arguments):
        calls.append((repo, arguments))
        return str(tmp_path)

    monkeypatch.setattr(records.huggingface_hub, "snapshot_download", download)
    return calls


@pytest.mark.parametrize("inside, expected", [("main", "main/train"), ("main/", "main/train"),
                                              ("main/test-*", "main/test"),
                                              ("main/test-00000-of-00001.parquet", "main/test")])
def test_hub_data_sets(tmp_path, text, monkeypatch, inside, expected):
    calls = hub_folder(tmp_path, monkeypatch)
    made = source(f"openai/gsm8k/{inside}@[:1]", text)
    assert prompts(made.take(1)) == [f"{expected}-00000-of-00001"] and made.num_rows == 1
    assert calls[0][0] == "openai/gsm8k" and calls[0][1]["repo_type"] == "dataset"


def test_hub_failures(tmp_path, text, monkeypatch):
    hub_folder(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="has several data sets"):
        source("openai/gsm8k", text)
    with pytest.raises(ValueError, match="no file there ends in"):
        source("openai/gsm8k/nothing", text)


@pytest.mark.parametrize("error", [OSError("offline"), ValueError("bad id")])
def test_hub_errors_are_explained(text, monkeypatch, error):
    def download(*_, **__):
        raise error

    monkeypatch.setattr(records.huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=f"'openai/gsm8k': no such file or folder, .* failed: {error}"):
        source("openai/gsm8k", text)
    with pytest.raises(ValueError, match="no hub data set"):  # a file name is not taken for a hub id
        source("gone/train.jsonl", text)


# order


@case("DAT-010")
def test_orders(tmp_path, text, case):
    given_ = case["input"]
    orders = [[int(data.epoch_order(given_["rows"], seed, epoch, True)[i]) for i in range(given_["rows"])]
              for seed in given_["seeds"] for epoch in given_["epochs"]]
    assert all(sorted(order) == list(range(given_["rows"])) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == [4, 13, 1, 11, 12, 8, 14, 10, 9, 5, 0, 15, 6, 7, 2, 3], "the same in every run and version"
    path = write(tmp_path / "d.jsonl", [{"prompt": f"{i}", "label": i} for i in range(given_["rows"])])
    for i, seed in enumerate(given_["seeds"]):
        made = source(path, text, shuffle=True, seed=seed)
        assert [s.label for s in made.take(given_["rows"])] == orders[2 * i]
        assert [s.label for s in made.take(given_["rows"])] == orders[2 * i + 1]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(-5, 2**70), st.integers(0, 10**6))
def test_every_order_is_a_permutation(rows, seed, epoch):
    order = data.epoch_order(rows, seed, epoch, True)
    assert sorted(int(order[i]) for i in range(rows)) == list(range(rows))


def test_without_shuffle_rows_come_in_order(rows100, text):
    made = source(rows100, text)
    assert prompts(made.take(250)) == [f"p{i % 100}" for i in range(250)]
    assert (made.epoch, made.state()["index"]) == (2, 50)


# resume


@case("DAT-001")
def test_resume_at_an_epochs_border(tmp_path, text, case):
    rows, batch = case["input"]["rows"], case["input"]["batch"]
    steps = rows * case["input"]["epochs"] // batch
    path = write(tmp_path / "d.jsonl", [{"prompt": f"{i}", "label": i} for i in range(rows)])
    whole = source(path, text, shuffle=True)
    batches = [prompts(whole.take(batch)) for _ in range(steps)]
    first = source(path, text, shuffle=True)
    for _ in range(case["input"]["saved_at_step"]):
        first.take(batch)
    assert (first.epoch, first.state()["index"]) == (1, 0)
    resumed = source(path, text, shuffle=True)
    resumed.restore(json.loads(json.dumps(first.state())))
    after = [prompts(resumed.take(batch)) for _ in range(case["expected"]["steps_after_resume"])]
    assert case["input"]["saved_at_step"] + len(after) == case["expected"]["final_step"] == steps
    assert after == batches[case["input"]["saved_at_step"]:]
    assert sorted(sum(after, [])) == sorted(f"{i}" for i in range(rows)), "the whole second epoch"


@case("DAT-002")
def test_resume_in_the_middle(tmp_path, text, case):
    given_ = case["input"]
    path = write(tmp_path / "d.jsonl", [{"prompt": f"{i}", "label": i} for i in range(given_["rows"])])
    whole, crashed, resumed = (source(path, text, shuffle=True, seed=given_["seed"]) for _ in range(3))
    batches = [prompts(whole.take(given_["batch"])) for _ in range(5)]
    for _ in range(given_["crash_after_step"]):
        crashed.take(given_["batch"])
    resumed.restore(crashed.state())
    assert [prompts(resumed.take(given_["batch"])) for _ in range(3)] == batches[2:]


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=5), cut=st.integers(0, 5), shuffle=st.booleans(),
       seed=st.integers(0, 3))
def test_a_restored_source_continues_exactly(rows100, text, sizes, cut, shuffle, seed):
    """Any batch sizes, across epochs: one stream, cut anywhere; each epoch has every row once."""
    whole, first, second = (source(rows100 + "@[:37]", text, shuffle=shuffle, seed=seed) for _ in range(3))
    stream = prompts(whole.take(sum(sizes)))
    got = [prompts(first.take(n)) for n in sizes[:cut]]
    second.restore(json.loads(json.dumps(first.state())))
    got += [prompts(second.take(n)) for n in sizes[cut:]]
    assert sum(got, []) == stream
    assert second.epoch == len(stream) // 37 and second.state() == whole.state()
    for epoch in range(len(stream) // 37):
        assert len(set(stream[epoch * 37: (epoch + 1) * 37])) == 37


def test_changed_data_is_said(tmp_path, text, caplog):
    path = write(tmp_path / "d.jsonl", [{"prompt": f"{i}", "label": i} for i in range(9)])
    first = source(path, text)
    first.take(7)
    write(tmp_path / "d.jsonl", [{"prompt": f"{i}", "label": -i} for i in range(8)])
    second = source(path, text)
    with caplog.at_level(logging.WARNING):
        second.restore(first.state())
    assert first.fingerprint in caplog.text and second.fingerprint in caplog.text
    assert "with 9 prompts then" in caplog.text and "with 8 now" in caplog.text
    assert prompts(second.take(2)) == ["7", "0"]
    write(tmp_path / "d.jsonl", [{"prompt": f"{i}", "label": i} for i in range(3)])
    third = source(path, text)
    third.restore(first.state())
    assert (third.epoch, third.state()["index"]) == (1, 0), "place 7 of a file of 3 is the next epoch"


def test_unchanged_data_is_not_warned_about(rows100, text, caplog):
    made = source(rows100, text)
    made.restore(made.state())
    assert not caplog.records
    assert source(rows100 + "@[:50]", text).fingerprint != made.fingerprint


@pytest.mark.parametrize("change, message", [
    ({"seed": 1}, "of data.seed 1, not 42"), ({"shuffle": True}, "of data.shuffle True, not False"),
    ({"index": 100}, "impossible: epoch 0, index 100 of 100"), ({"index": -1}, "impossible"),
    ({"epoch": -1}, "impossible: epoch -1"), ({"epoch": None}, "lacks epoch")])
def test_impossible_states(rows100, text, change, message):
    made = source(rows100, text)
    state = {key: value for key, value in {**made.state(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        made.restore(state)


# Mixtures


def mixture(text, tmp_path, weights=(3.0, 1.0), rows=(4, 6)):
    sources = []
    for name, count in zip("ab", rows):
        file = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"prompt": str(n), "label": name}) for n in range(count)]
        file.write_text("\n".join(lines), encoding="utf-8")
        sources.append(data.PromptSource(str(file), text, max_prompt_len=8))
    return data.Mixture(sources, weights)


def test_a_mixture_keeps_its_shares_in_every_stretch_and_its_place(text, tmp_path):
    one, other = mixture(text, tmp_path), mixture(text, tmp_path)
    drawn = one.take(40)
    labels = [sample.label for sample in drawn]
    for start in range(0, 40, 4):
        assert labels[start : start + 4].count("a") == 3
    assert {sample.prompt for sample in drawn if sample.label == "a"} == {"0", "1", "2", "3"}
    other.take(7)
    place = json.loads(json.dumps(other.state()))
    expected = [(s.label, s.prompt) for s in other.take(9)]
    again = mixture(text, tmp_path)
    again.restore(place)
    assert [(s.label, s.prompt) for s in again.take(9)] == expected
    assert one.num_rows == 10 and one.largest_id > 0
    for lone in (data.Mixture(one.sources[:1], [1.0]), one.sources[0]):
        with pytest.raises(ValueError, match="of 2 sources, data.prompt_data has 1"):
            lone.restore(place)
    with pytest.raises(ValueError, match="of 1 sources, data.prompt_data has 2"):
        one.restore(one.sources[0].state())


def test_how_a_mixture_is_written():
    assert data.parse_mixture("a.jsonl") == [(1.0, "a.jsonl")]
    assert data.parse_mixture("0.7*a.jsonl@[:3] + b/*.parquet") == [(0.7, "a.jsonl@[:3]"), (1.0, "b/*.parquet")]
    assert data.parse_mixture("dir/x*y.jsonl") == [(1.0, "dir/x*y.jsonl")]
    for bad in ("0*a.jsonl", "1*", "1.2.3*a + b", "1e400*a + b"):
        with pytest.raises(ValueError, match="weight above 0"):
            data.parse_mixture(bad)
