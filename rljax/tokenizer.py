"""Text to token ids and back: Hugging Face tokenizers, chat templates, stop ids, stop strings, a character tokenizer.

Special tokens are never added behind the caller's back: a chat template writes its own start token, and only
`encode_prompts` (for plain text) puts the start token in front that the tokenizer itself would.
"""

from __future__ import annotations

import bisect
import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
import transformers

from rljax import hub

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
PATTERNS = ["*.json", "*.txt", "*.jinja", "*.model"]
PAD, EOS = "<pad>", "<eos>"


class Tokenizer:
    """One tokenizer with the stop ids of its model folder and its chat template. Made by `load`.

    stop_ids: ids that end a response (0 is a valid one). vocab_size: the largest id + 1; rows of the output head
    beyond it are never drawn. pad_id: the tokenizer's padding id, else its smallest stop id, else 0.
    """

    def __init__(self, hf: Any, stop_ids: Iterable[int] = (), chat_template_kwargs: dict[str, Any] | None = None):
        """hf: a transformers tokenizer; stop_ids: those of the model's configs, joined with the tokenizer's own."""
        self.hf = hf
        own = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.stop_ids: frozenset[int] = frozenset([*own, *stop_ids])
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.vocab_size: int = max(hf.get_vocab().values()) + 1
        self.pad_id: int = hf.pad_token_id if hf.pad_token_id is not None else min(self.stop_ids, default=0)
        self._characters = _characters(hf)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(self.hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added. A character that a character tokenizer lacks raises ValueError naming it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        for text in texts:
            self._check(text)
        if not texts:
            return []
        return self.hf(list(texts), add_special_tokens=False, return_attention_mask=False,
                       return_token_type_ids=False, verbose=False)["input_ids"]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of plain-text prompts: `encode`, led by the start token once where the tokenizer adds one itself."""
        start = self._start_ids
        return [ids if ids[: len(start)] == start else start + ids for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`, spaces as they are; special tokens are left out unless `skip_special` is False."""
        return self.hf.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True,
               tools: list[dict[str, Any]] | None = None) -> str:
        """The chat template's text for `messages`; ValueError where there is no template or it refuses them."""
        if not self.has_chat_template:
            raise ValueError(f"the tokenizer of {self.hf.name_or_path} has no chat template, so chat messages cannot "
                             f"be rendered: give prompts as text with model.chat_template=False")
        import jinja2  # here, so that plain-text prompts do without it

        try:
            return self.hf.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt,
                                               tokenize=False, **self.chat_template_kwargs)
        except (jinja2.TemplateError, TypeError, KeyError) as error:  # what templates raise on messages they reject
            raise ValueError(f"the chat template refuses the messages: {error}") from error

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True,
                            tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of `render`: the start token stands there once, if the template writes it, and nothing is added."""
        return self.encode(self.render(messages, add_generation_prompt, tools))

    def conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None):
        """(ids, mask) of a whole chat: mask 1 on what the assistant says, up to the token that ends its turn.

        ValueError where the chat has no assistant turn, or where the template writes a turn in another way once more
        messages follow it, so that its tokens cannot be told.
        """
        if messages[0]["role"] == "assistant":
            raise ValueError("the conversation begins with the assistant: nothing stands before its first turn")
        text, spans = self.render(messages, False, tools), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:index], True, tools)
                after = self.render(messages[: index + 1], False, tools)
                if not text.startswith(before) or not text.startswith(after) or len(after) <= len(before):
                    raise ValueError(f"the chat template writes the assistant's message {index} in another way once "
                                     f"more messages follow it: give conversations that end with their only answer")
                spans.append((len(before), len(after)))
        if not spans:
            raise ValueError("the conversation has no assistant message to learn from")
        encoded = self.hf(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, mask = encoded["input_ids"], [0] * len(encoded["input_ids"])
        for begin, end in spans:
            inside = [at for at, (start, _) in enumerate(encoded["offset_mapping"]) if begin <= start < end]
            ends = [at for at in inside if ids[at] in self.stop_ids]  # what stands behind is the template's
            for at in inside:
                mask[at] = int(not ends or at <= ends[-1])
        if 1 not in mask:
            raise ValueError("what the assistant says has no tokens")
        return ids, mask

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts that are recognised as one special id, whose decoding is empty."""
        added = self.hf.added_tokens_decoder.values()
        return frozenset([token.content for token in added if token.special] + list(self.hf.all_special_tokens))

    @functools.cached_property
    def _start_ids(self) -> list[int]:
        """What the tokenizer by itself puts in front of a text: a start token or nothing."""
        probe = next(text for text in ("a", "1", " ") if self._characters is None or text in self._characters)
        plain, full = self.encode(probe), self.hf(probe)["input_ids"]
        where = next((i for i in range(len(full)) if full[i: i + len(plain)] == plain), 0)
        return full[:where]

    def _check(self, text: str) -> None:
        """Raise ValueError for text that is no Unicode, or that a character tokenizer has no id for."""
        if self._characters is not None:
            rest = functools.reduce(lambda left, token: left.replace(token, ""), self.special_tokens, text)
            if unknown := sorted(set(rest) - self._characters):
                raise ValueError(f"the character tokenizer of {self.hf.name_or_path} has no id for "
                                 f"{', '.join(map(repr, unknown))} in {text[:80]!r}; it knows "
                                 f"{''.join(sorted(self._characters))!r}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"half a surrogate pair at character {error.start} of {text[:80]!r}") from None


def load(path: str | pathlib.Path, chat_template_kwargs: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a model folder, built-in name or hub id.

    stop_ids is the union of the tokenizer's eos token and `eos_token_id` (an int or a list) of config.json and
    generation_config.json. chat_template_kwargs reach the chat template, e.g. {"enable_thinking": False}.
    Raises ValueError for a GGUF file and for a folder without a tokenizer, naming what was looked for.
    """
    folder = hub.resolve(str(path), PATTERNS)
    if folder.is_file():
        if folder.suffix == ".gguf":
            raise ValueError(f"{folder}: a GGUF file's tokenizer is read by converting the file first: "
                             f"python -m rljax.models.gguf {folder} FOLDER, then use FOLDER as the path")
        folder = folder.parent
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise ValueError(f"{folder}: no tokenizer there (none of {', '.join(VOCABULARIES)})")
    return Tokenizer(_load_hf(folder), _config_stop_ids(folder), chat_template_kwargs)


def _load_hf(folder: pathlib.Path) -> Any:
    """tokenizer.json as it stands where there is one: model classes rebuild parts of it from their own defaults."""
    exact = (folder / "tokenizer.json").exists()
    loader = transformers.PreTrainedTokenizerFast if exact else transformers.AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: cannot load the tokenizer: {error}") from error


def _config_stop_ids(folder: pathlib.Path) -> list[int]:
    """Every `eos_token_id` of config.json (its text part too) and generation_config.json."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if not file.exists():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not JSON: {error}") from error
        for part in (config, config.get("text_config") or {}):
            ids += _ids(part.get("eos_token_id"), file)
    return ids


def _ids(value: Any, file: pathlib.Path) -> list[int]:
    """An id, a list of ids or null as a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if bad := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or i < 0]:
        raise ValueError(f"{file}: eos_token_id holds {bad[0]!r}, which is no token id")
    return ids


def _characters(hf: Any) -> frozenset[str] | None:
    """The characters of a character tokenizer (words of one character, no unknown word); None for other kinds."""
    model = getattr(getattr(hf, "backend_tokenizer", None), "model", None)
    if not isinstance(model, tokenizers.models.WordLevel) or model.unk_token in hf.get_vocab():
        return None
    return frozenset(token for token in hf.get_vocab() if len(token) == 1)


def character_tokenizer(characters: str, path: str | pathlib.Path) -> None:
    """Write a folder whose tokens are `<pad>` (id 0), `<eos>` (id 1) and one for each of `characters`, in order.

    Both files are ordinary Hugging Face ones. There is no chat template: prompts are plain text. Raises ValueError
    for no or repeated characters.
    """
    if not characters or len(set(characters)) != len(characters):
        raise ValueError(f"a character tokenizer wants distinct characters, got {characters!r}")
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(""), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([PAD, EOS])
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": EOS,
              "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """The first stop string completed in `ids`: (tokens up to and with the one that completes it, text before it).

    Of several, the one that ends first in the text counts, then the longest. What is complete within the first `start`
    ids does not count; only a tail of them is decoded again, so a call after every few tokens is cheap. None where no
    stop string is complete. A special token is matched where a stop string spells one out.
    """
    stop = [text for text in stop if text]
    if not stop or start >= len(ids):
        return None
    skip = not any(token in text for text in stop for token in tokenizer.special_tokens)
    first = _window(tokenizer, ids, start, max(map(len, stop)), skip)

    before = _length(tokenizer, ids[first:start], skip)

    def complete(count: int) -> bool:
        return _end(tokenizer.decode(ids[first:count], skip), stop, before) is not None

    if not complete(len(ids)):
        return None
    count = bisect.bisect_left(range(len(ids)), True, lo=start + 1, key=complete)
    text = tokenizer.decode(ids[:count], skip)
    found = _end(text, stop, _length(tokenizer, ids[:start], skip))
    return None if found is None else (count, text[: found[1]])


def _window(tokenizer: Tokenizer, ids: Sequence[int], start: int, reach: int, skip: bool) -> int:
    """Where to begin decoding so that any stop string of `reach` characters that ends after `start` is whole."""
    size = reach + 4  # an unfinished character or a swallowed leading space may stand at the left border
    while size < start and len(tokenizer.decode(ids[start - size: start], skip)) < reach + 4:
        size *= 2
    return max(0, start - size)


def _length(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> int:
    """Characters of `ids` that no later id changes: an unfinished one at the end does not count."""
    return len(tokenizer.decode(ids, skip).rstrip("\ufffd")) if ids else 0


def _end(text: str, stop: Sequence[str], before: int) -> tuple[int, int] | None:
    """(end, begin) of the stop string that ends first in `text` behind its first `before` characters, the longest of
    those; None where there is none."""
    places = [(text.find(word, max(0, before + 1 - len(word))), word) for word in stop]
    return min(((at + len(word), at) for at, word in places if at >= 0), default=None)
