"""kvfast as it is installed, and what is compiled against it."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kvfast

ROOT = Path(__file__).parents[2]
EXTENSIONS = Path(__file__).parent / "extensions"


def command(*parts, **options):
    done = subprocess.run([sys.executable, *map(str, parts)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """The folder of a kvfast that was installed from a wheel: of the sources, if that is where it is imported from."""
    package = Path(kvfast.__file__).parent
    if not (package / "capi.pyx").exists():
        return package.parent
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("kvfast", "kvfast_vllm.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / "source" / name) if name == "kvfast" else copy(ROOT / name, folder / "source")
    # What is compiled already need not be again.
    built = folder / "source" / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "kvfast"
    built.mkdir(parents=True)
    for module in package.rglob("*.so"):
        name = module.relative_to(package)
        (built / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module, built / name)
        (folder / "source" / "kvfast" / name).unlink()
    for path in folder.rglob("*.pyx"):  # nor translated, as by a Cython that was installed after the build
        if path.with_suffix(".c").exists():
            os.utime(path.with_suffix(".c"))
    for path in built.rglob("*.so"):
        os.utime(path)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    command("-m", "pip", "wheel", *options, "-w", folder, folder / "source", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    command("-m", "pip", "install", *options[1:], "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"


@pytest.fixture(scope="session")
def extension(installed, tmp_path_factory):
    """Imports one of the extensions, all of which are compiled against the installed kvfast."""
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    folder = tmp_path_factory.mktemp("extensions")
    for file in EXTENSIONS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    command("setup.py", "-q", "build_ext", "--inplace", cwd=folder, env=os.environ | {"PYTHONPATH": path})

    def imported(name):
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(folder))

    return imported


@pytest.fixture(scope="session")
def c(extension):
    """`kvfast.h` as objects."""
    return extension("batches_in_cython")
