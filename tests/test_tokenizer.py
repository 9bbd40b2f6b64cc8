"""tokenizer.py: character tokenizer, chat templates, stop ids, stop strings, and SmolLM2's golden ids."""

from __future__ import annotations

import json
import pathlib

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from shared_data import cases, shared

from rljax import tokenizer as tk

CASES = {case["id"]: case for area in ("data", "sampler") for case in cases(area)}
SMOLLM2 = pathlib.Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"
DIGITS = "0123456789+-*= \n"


def build(folder, words=(), template=None, specials=("<bos>", "<eos>"), post=None, **config):
    """A byte-level tokenizer: the 256 bytes, then `words` (merged), then `specials`; saved as a HF folder."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {token: i for i, token in enumerate(alphabet)}, []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    if post:
        names = [token for token in specials if token in post]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=post, special_tokens=[(name, backend.token_to_id(name)) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>",
              "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    tk.character_tokenizer(DIGITS, folder)
    return tk.load(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tk.load(build(tmp_path_factory.mktemp("bytes"), words=["User", "the", "12"]))


# character tokenizer


def test_character_tokenizer_ids(digits):
    assert digits.encode("12+3=") == [3, 4, 12, 5, 15]
    assert digits.encode("\n \n") == [17, 16, 17]
    assert (digits.vocab_size, digits.pad_id, digits.stop_ids) == (18, 0, {1})
    assert not digits.has_chat_template
    assert digits.encode("") == [] and digits.encode_batch([]) == []


@given(st.text(alphabet=DIGITS))
def test_character_tokenizer_round_trip(digits, text):
    ids = digits.encode(text)
    assert len(ids) == len(text)
    assert digits.decode(ids) == text


def test_character_tokenizer_special_tokens(digits):
    assert digits.encode("1<eos>") == [3, 1]
    assert digits.decode([3, 1, 0]) == "1"
    assert digits.decode([3, 1, 0], skip_special=False) == "1<eos><pad>"


@pytest.mark.parametrize("text, named", [("1 plus 1", ["'p'", "'l'", "'u'", "'s'"]), ("1é", ["'é'"]),
                                         ("<pad", ["'<'"])])
def test_unknown_characters_are_named(digits, text, named):
    with pytest.raises(ValueError, match="no id for") as error:
        digits.encode(text)
    assert all(name in str(error.value) for name in named)


def test_character_tokenizer_of_other_scripts(tmp_path):
    tk.character_tokenizer("aé漢🙂\u0301\r\t", tmp_path)
    tokenizer = tk.load(tmp_path)
    assert tokenizer.encode("🙂é漢\u0301a\r\t") == [5, 3, 4, 6, 2, 7, 8]
    assert tokenizer.decode([5, 3, 4, 6, 2, 7, 8]) == "🙂é漢\u0301a\r\t"


@pytest.mark.parametrize("characters", ["", "aba"])
def test_character_tokenizer_refuses(tmp_path, characters):
    with pytest.raises(ValueError, match="distinct characters"):
        tk.character_tokenizer(characters, tmp_path)


# loading


def test_load_errors(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer there"):
        tk.load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"python -m rljax\.models\.gguf .*model\.gguf"):
        tk.load(tmp_path / "model.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}: cannot load the tokenizer"):
        tk.load(tmp_path)


def test_half_a_surrogate_pair_is_refused(plain):
    with pytest.raises(ValueError, match="surrogate pair at character 2"):
        plain.encode("ab\ud800")


@given(st.text())
def test_byte_level_round_trip(plain, text):
    assert plain.decode(plain.encode(text), skip_special=False) == text


# stop ids


@pytest.mark.parametrize("config, generation, expected", [
    (None, None, {257}),
    (106, None, {257, 106}),
    ([1, 106], None, {257, 1, 106}),
    (0, [5, 257], {257, 0, 5}),
    (None, 7, {257, 7}),
])
def test_stop_ids_are_a_union(tmp_path, config, generation, expected):
    build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert tk.load(tmp_path).stop_ids == expected


@pytest.mark.parametrize("case", [c for c in CASES.values() if c["id"] == "SMP-003"], ids=lambda c: c["id"])
def test_stop_ids_case(tmp_path, case):
    given_ = case["input"]
    build(tmp_path)
    hf = tk.load(tmp_path).hf
    hf.eos_token = hf.convert_ids_to_tokens(given_["tokenizer_eos"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given_["generation_config_eos"]}))
    tokenizer = tk.Tokenizer(hf, tk._config_stop_ids(tmp_path))
    assert tokenizer.stop_ids == set(case["expected"]["stop_ids"])
    cut = next(i for i, token in enumerate(given_["stream"]) if token in tokenizer.stop_ids) + 1
    assert given_["stream"][:cut] == case["expected"]["response_tokens"]


def test_end_id_zero_is_an_id(tmp_path):
    """SMP-024: id 0 ends a response and pads like any other."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1}, unk_token="<unk>"))
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "<eos>"}))
    tokenizer = tk.load(tmp_path)
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ({0}, 0)


def test_text_part_of_a_config_and_bad_ids(tmp_path):
    build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    assert tk.load(tmp_path).stop_ids == {257, 9}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(ValueError, match="config.json: eos_token_id holds '</s>'"):
        tk.load(tmp_path)


def test_vocab_size_counts_added_tokens(tmp_path):
    assert tk.load(build(tmp_path, specials=("<bos>", "<eos>", "<extra>"))).vocab_size == 259


# chat templates

BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
NO_BOS_TEMPLATE = BOS_TEMPLATE.replace("{{ bos_token }}", "")


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}], ids=["post-processor", "add_bos_token"])
@pytest.mark.parametrize("template, count", [(BOS_TEMPLATE, 1), (NO_BOS_TEMPLATE, 0)])
def test_the_template_alone_writes_the_start_token(tmp_path, settings, template, count):
    """CHT-001: a tokenizer that adds a start token by itself adds none to what the template wrote."""
    tokenizer = tk.load(build(tmp_path, template=template, post="<bos> $A <eos>", **settings))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert ids.count(256) == count
    assert ids[-1] == tokenizer.encode("i")[0], "no end token behind the prompt either"


@pytest.mark.parametrize("post, start", [("<bos> $A", [256]), ("<bos> $A <eos>", [256]), ("$A <eos>", []), (None, [])])
def test_plain_prompts_get_the_tokenizers_start_token_once(tmp_path, post, start):
    tokenizer = tk.load(build(tmp_path, post=post))
    plain = tokenizer.encode("hi")
    assert len(plain) == 2
    assert tokenizer.encode_prompts(["hi", "<bos>hi", ""]) == [start + plain, [256, *plain], start]


THINK_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
MESSAGES = [{"role": "user", "content": "2+2"}]


def test_chat_template_kwargs_reach_the_template(tmp_path):
    """CHT-005: the switch of a hybrid template."""
    build(tmp_path, template=THINK_TEMPLATE)
    suffix = "<think>\n\n</think>\n\n"
    assert tk.load(tmp_path, {"enable_thinking": False}).render(MESSAGES) == f"<|user|>2+2\n<|assistant|>\n{suffix}"
    assert not tk.load(tmp_path).render(MESSAGES).endswith(suffix)
    assert not tk.load(tmp_path, {"enable_thinking": True}).render(MESSAGES).endswith(suffix)


def test_generation_prompt_and_tools(tmp_path):
    tokenizer = tk.load(build(tmp_path, template=THINK_TEMPLATE))
    assert tokenizer.render(MESSAGES, add_generation_prompt=False) == "<|user|>2+2\n"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert "1 tools" in tokenizer.render(MESSAGES, tools=[tool])
    text = tokenizer.render(MESSAGES, tools=[tool])
    assert tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, tools=[tool]), skip_special=False) == text


def test_prompt_and_completion_ids_are_joined_not_rendered(tmp_path):
    """CHT-004: the opening reasoning tag is the prompt's; prompt ids + completion ids decode to both texts."""
    tokenizer = tk.load(build(tmp_path, template=NO_BOS_TEMPLATE + "{{ '<think>\\n' }}"))
    prompt, completion = tokenizer.apply_chat_template(MESSAGES), tokenizer.encode("r</think>\n\n4")
    assert tokenizer.decode(prompt + completion) == "user: 2+2<think>\nr</think>\n\n4"


def test_template_errors(tmp_path, digits):
    with pytest.raises(ValueError, match="no chat template"):
        digits.apply_chat_template(MESSAGES)
    refuses = tk.load(build(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        refuses.render(MESSAGES)


# stop strings


CHAT = ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %} ; {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}")
TURNS = [{"role": "user", "content": "hé?"}, {"role": "assistant", "content": "the 12é"},
         {"role": "user", "content": "[assistant]"}, {"role": "assistant", "content": "User"}]


def test_a_conversation_marks_what_the_assistant_says(tmp_path):
    tokenizer = tk.load(build(tmp_path, words=["User", "the", "12"], template=CHAT))
    ids, mask = tokenizer.conversation(TURNS)
    assert ids == tokenizer.apply_chat_template(TURNS, add_generation_prompt=False)
    parts = []
    runs = [i for i, one in enumerate(mask) if one and (i == 0 or not mask[i - 1])]
    for start in runs:
        end = start + mask[start:].index(0)
        parts.append(tokenizer.decode(ids[start:end], skip_special=False))
    assert parts == ["the 12é<eos>", "User<eos>"]  # the end of the turn is learned, what follows is the template's


@pytest.mark.parametrize(("messages", "template", "named"), [
    (TURNS[:1], CHAT, "no assistant message"),
    (TURNS, CHAT.replace("{{ m.content }}", "{{ loop.length }}{{ m.content }}"), "message 1 in another way"),
    (TURNS[1:], CHAT, "begins with the assistant"),
])
def test_conversations_without_marks(tmp_path, messages, template, named):
    tokenizer = tk.load(build(tmp_path, template=template))
    with pytest.raises(ValueError, match=named):
        tokenizer.conversation(messages)


def naive_stop(tokenizer, ids, stop):
    """Decode every prefix, from the start."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        ends = sorted((text.find(s) + len(s), text.find(s)) for s in stop if s in text)
        if ends:
            return count, text[: ends[0][1]]
    return None


def stream_stop(tokenizer, ids, stop, steps):
    """find_stop after every dispatch of `steps` tokens."""
    for start in range(0, len(ids), steps):
        found = tk.find_stop(tokenizer, ids[: start + steps], stop, start)
        if found:
            return found
    return None


@pytest.mark.parametrize("case", [c for c in CASES.values() if c["kind"] == "stop strings"], ids=lambda c: c["id"])
def test_stop_string_case(plain, case):
    ids = plain.encode(case["input"]["text"])
    count, text = tk.find_stop(plain, ids, case["input"]["stop"])
    assert text == case["expected"]["text_for_reward"]
    assert case["input"]["stop"][0] in plain.decode(ids[:count])
    assert case["input"]["stop"][0] not in plain.decode(ids[: count - 1])


STOPS = st.lists(st.text(alphabet="abU:\né漢🙂12", min_size=1, max_size=4), max_size=3)


@given(st.text(alphabet="abU:ser\n é漢🙂12"), STOPS, st.integers(1, 7))
def test_stop_strings_equal_the_naive_search(plain, text, stop, steps):
    ids = plain.encode(text)
    assert stream_stop(plain, ids, stop, steps) == naive_stop(plain, ids, stop)
    assert tk.find_stop(plain, ids, stop) == naive_stop(plain, ids, stop)


def test_stop_string_that_starts_long_before(plain):
    ids = plain.encode("x" * 300 + "abcdefghij" * 9 + "END")
    stop = ("abcdefghij" * 9 + "END",)
    assert stream_stop(plain, ids, stop, 3) == (len(ids), "x" * 300)


def test_of_several_the_one_that_ends_first(plain):
    ids = plain.encode("abcd")
    assert tk.find_stop(plain, ids, ("abcd", "bc")) == (3, "a")
    assert tk.find_stop(plain, ids, ("bc", "abc")) == (3, "")
    assert tk.find_stop(plain, ids, ("x", "")) is None
    assert tk.find_stop(plain, ids, ()) is None


def test_what_the_first_tokens_complete_does_not_count(plain):
    ids = plain.encode("abxccccccccccxdd")
    assert tk.find_stop(plain, ids, ("x",), 10) == (14, "abxcccccccccc")
    assert tk.find_stop(plain, ids, ("x", "bx"), 14) is None
    assert tk.find_stop(plain, ids, ("cx", "x"), 3) == (14, "abxccccccccc")


def test_special_tokens_and_stop_strings(plain):
    ids = plain.encode("ab<bos>cd<eos>x")
    assert tk.find_stop(plain, ids, ("bc",)) == (4, "a")
    assert tk.find_stop(plain, ids, ("<eos>",)) == (6, "ab<bos>cd")


def test_only_a_tail_is_decoded(plain, monkeypatch):
    ids, decoded = plain.encode("ab" * 5000), []
    monkeypatch.setattr(plain.hf, "decode", lambda ids, **_: decoded.append(len(ids)) or "ab" * len(ids))
    assert tk.find_stop(plain, ids, ("User:",), len(ids) - 16) is None
    assert sum(decoded) < 100


# golden


@pytest.fixture(scope="module")
def smollm2():
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2} is missing: launch/fetch_smollm2.sh makes it")
    return tk.load(SMOLLM2), json.loads(shared("golden", "smollm2", "goldens.json").read_text(encoding="utf-8"))


def test_smollm2_text(smollm2):
    tokenizer, golden = smollm2
    for row in golden["tokenizer"]:
        assert tokenizer.encode(row["text"]) == row["ids"], row
        assert tokenizer.decode(row["ids"], skip_special=False) == row.get("decoded", row["text"])
    assert tokenizer.encode_batch([row["text"] for row in golden["tokenizer"]]) == [
        row["ids"] for row in golden["tokenizer"]]


def test_smollm2_chat(smollm2):
    tokenizer, golden = smollm2
    for row in golden["chat"]:
        assert tokenizer.render(row["messages"], row["add_generation_prompt"]) == row["text"]
        assert tokenizer.apply_chat_template(row["messages"], row["add_generation_prompt"]) == row["ids"]
    for row in golden["greedy"]:
        assert tokenizer.apply_chat_template(row["messages"]) == row["prompt_ids"]
        assert tokenizer.decode(row["ids"]) == row["text"]
    assert tokenizer.stop_ids >= {2} and tokenizer.vocab_size == 49152
