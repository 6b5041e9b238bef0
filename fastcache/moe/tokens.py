"""Text to ids and back, by the tokenizer beside a checkpoint; and the tokens that end a text.

Owns `tokenizer_of`, `Detokenizer` and `eos_of`. Knows no model. Imports errors, layout, and tokenizers when asked.
"""

from __future__ import annotations

import json
import os
from typing import Any

from fastcache.errors import CheckpointError, CheckpointNotFound, FeatureUnavailable
from fastcache.layout.families import config_value
from fastcache.layout.record import Layout


def tokenizer_of(path: str | os.PathLike[str]) -> Any:
    """Return the tokenizers.Tokenizer of tokenizer.json in a directory, or beside a file.

    Raises
    ------
    CheckpointNotFound
        There is no tokenizer.json.
    FeatureUnavailable
        The package tokenizers is not installed.
    """
    root = os.path.abspath(os.fspath(path))
    file = os.path.join(root if os.path.isdir(root) else os.path.dirname(root), "tokenizer.json")
    if not os.path.isfile(file):
        raise CheckpointNotFound(f"{file}: no such file; a prompt in text needs it. Give ids instead")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise FeatureUnavailable(
            "a prompt in text needs the package tokenizers: pip install 'fastcache-moe[tokenizers]'"
        ) from error
    try:
        return Tokenizer.from_file(file)
    except Exception as error:
        raise CheckpointError(f"{file}: {error}") from error


class Detokenizer:
    """Gives text as tokens come: what can no longer change, each part once.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._ids, self.text = tokenizer, list[int](), ""

    def add(self, token: int) -> str:
        """Return what a token adds to the text; nothing while a character is not whole."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):  # the bytes of a character come in several tokens
            return ""
        return self._new(text)

    def end(self) -> str:
        """Return what was held back."""
        return self._new(self._tokenizer.decode(self._ids))

    def _new(self, text: str) -> str:
        new = text[len(self.text) :]
        self.text = text
        return new


def eos_of(layout: Layout) -> frozenset[int]:
    """Return the tokens that end a text: of generation_config.json beside the files, and of the config.

    Raises
    ------
    CheckpointError
        What stands there is no token, nor a list of them.
    """
    metadata = layout.config.get("gguf")
    if layout.format == "gguf" and isinstance(metadata, dict):
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return frozenset().union(*(_ids("the file", key, metadata.get(key)) for key in keys))
    found = _ids("config.json", "eos_token_id", config_value(layout.config, "eos_token_id"))
    path = os.path.join(os.path.dirname(layout.files[0]), "generation_config.json") if layout.files else ""
    if os.path.isfile(path):
        with open(path, encoding="utf-8-sig") as file:
            try:
                top = json.load(file)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{path}: not JSON ({error})") from None
        if isinstance(top, dict):
            found |= _ids(path, "eos_token_id", top.get("eos_token_id"))
    return found


def _ids(where: str, key: str, value: Any) -> frozenset[int]:
    """Return an id, or a list of them, or nothing."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in values):
        raise CheckpointError(f"{where}: {key} is {value!r}, neither a token nor a list of tokens")
    return frozenset(values)
