"""Models of the Hugging Face hub by their names."""

import re
from pathlib import Path

from megafrontier.common.errors import UserError
from megafrontier.common.files import search_folder_hint

_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_OTHERS = ["consolidated*", "original/*", "onnx/*"]
"""The same weights in other formats."""


def model_folder(name: str) -> Path:
    """The folder of this name, or that of the hub's model of this name, OWNER/NAME. The files come
    from the hub's cache, or from the network unless HF_HUB_OFFLINE is set.

    Raises UserError if there is neither.
    """
    if Path(name).exists() or not _NAME.fullmatch(name):
        return Path(name)
    missing = f"{name}: no such folder{search_folder_hint(name)}, and"
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:  # transformers brings it
        fits = "need pip install 'megafrontier[train]'"
        raise UserError(f"{missing} no huggingface_hub for a name in the hub, {fits}") from error
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_OTHERS))
    except Exception as error:  # the library and what it downloads with raise a dozen kinds
        reason = str(error).partition("\n")[0]
        raise UserError(f"{missing} none in the hub: {reason}") from error
