"""A GGUF file's byte-level BPE tokenizer as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

CONTROL, USER_DEFINED = 3, 4  # token types: special, and added but ordinary
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Pieces by a pattern, then bytes to characters."""
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names; ValueError for a name that is not known here."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return gpt2
    if name == "smollm":  # each numeric character alone first, also the non-ASCII ones, then the GPT-2 pattern
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name == "qwen2":
        return _split(QWEN2)
    if name == "llama-bpe":
        return _split(LLAMA3)
    raise ValueError(f"GGUF pre-tokenizer {name!r} is not supported; there are gpt-2, llama-bpe, qwen2, smollm")


def build(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that the metadata describes. Bytes without a token are dropped, as the file's own model does."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"GGUF tokenizer model {kind!r} is not supported, only byte-level BPE (gpt2)")
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        raise ValueError("GGUF tokenizer: add_space_prefix = True is not supported")
    needed = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")]
    if missing := [name for name in needed if name not in metadata]:
        raise ValueError(f"GGUF tokenizer: missing {', '.join(missing)}")
    tokens, types, pairs = (metadata[name] for name in needed)
    pre = metadata.get("tokenizer.ggml.pre", "")
    merges = [tuple(pair.split(" ", 1)) for pair in pairs]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # llama-bpe takes a whole piece that is a token as it is, even where merges would not lead to it
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens)
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in added])
    return tokenizer


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> processors.PostProcessor:
    """Nothing but offsets, or a start token in front: where the file says so, or is silent and Llama 3's."""
    plain = processors.ByteLevel(trim_offsets=False)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") == "llama-bpe"):
        return plain
    if bos is None:
        raise ValueError("GGUF tokenizer: a start token is to be added, but tokenizer.ggml.bos_token_id is missing")
    start = processors.TemplateProcessing(single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)])
    return processors.Sequence([plain, start])


def write(metadata: dict[str, Any], folder: pathlib.Path) -> None:
    """tokenizer.json and tokenizer_config.json (special tokens and chat template) into `folder`."""
    build(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        if (index := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            settings[key] = tokens[index]
    architecture = metadata.get("general.architecture")
    if (context := metadata.get(f"{architecture}.context_length")) is not None:
        settings["model_max_length"] = context
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
