"""From what a user writes as `model.path` to files on this machine."""

from __future__ import annotations

import pathlib

import huggingface_hub

BUILTIN = pathlib.Path(__file__).parent / "builtin"
PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]


def builtin_names() -> list[str]:
    """Names of the models shipped inside the package."""
    return sorted(folder.name for folder in BUILTIN.iterdir() if (folder / "config.json").exists())


def resolve(path: str, patterns: list[str] | None = None) -> pathlib.Path:
    """A local folder or GGUF file for `path`: a built-in name, a path, or a hub id `owner/name` (downloaded).

    `patterns` limits what is downloaded (default: config, tokenizer and safetensors). Raises ValueError where
    `path` is none of these, with what was tried.
    """
    if path in builtin_names():
        return BUILTIN / path
    local = pathlib.Path(path).expanduser()
    if local.exists():
        return local
    if path.count("/") != 1 or path.startswith((".", "/", "~")) or path.endswith(".gguf"):
        raise ValueError(f"model path {path!r}: no such file or folder, and neither a hub id (owner/name) nor "
                         f"a built-in model ({', '.join(builtin_names())})")
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(path, allow_patterns=patterns or PATTERNS))
    except (OSError, ValueError) as error:  # hub errors derive from OSError (HTTP, offline) or ValueError (bad id)
        raise ValueError(f"model path {path!r}: no such folder, and fetching it as a hub id failed: "
                         f"{' '.join(str(error).split())}") from error
