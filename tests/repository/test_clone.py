"""A clone is a folder of the package's name: it must not be taken for the package."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def beside(tmp_path):
    """A folder with a clone of which an editable install was made, by pyproject.toml as it is but with nothing to compile; and the
    Python that has the install."""
    pytest.importorskip("setuptools.build_meta", reason="needs setuptools")
    clone = tmp_path / "work" / "kvfast"
    (clone / "kvfast").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "kvfast" / "__init__.py").write_text("class KVCache: ...\n")
    # In a process of its own: setuptools replaces what is left of distutils in this one.
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    return clone.parent, tmp_path / "venv" / "bin" / "python"


@pytest.mark.skipif(sys.platform == "win32", reason="folders of a venv on POSIX")
@pytest.mark.parametrize("place", [".", "kvfast", "kvfast/kvfast", "elsewhere"])
def test_a_script_beside_the_clone_finds_the_package(beside, place):
    folder, python = beside
    (folder / place).mkdir(exist_ok=True)
    script = folder / place / "first.py"
    script.write_text("import kvfast\nprint(kvfast.KVCache, kvfast.__file__)\n")
    for command in ([python, script], [python, "-m", "first"], [python, "-c", "import kvfast; print(kvfast.KVCache, kvfast.__file__)"]):
        done = subprocess.run(command, cwd=folder / place, capture_output=True, text=True, check=False, env={"PYTHONNOUSERSITE": "1"})
        assert done.returncode == 0 and str(folder / "kvfast" / "kvfast") in done.stdout, done.stderr
