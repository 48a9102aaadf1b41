"""The workflow of a release and the recipe for conda: steps run, what they name is there, and no job may do more than it must."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from kvfast.tools import cli

yaml = pytest.importorskip("yaml", reason="PyYAML, which the extra llama brings, is not installed")
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
RELEASE = yaml.safe_load(TEXT.replace("${{ matrix.system }}", "one"))
STUBS = {  # they check what is asked, and leave the files that the real ones leave
    "ci/wheel.sh": "[ $QUICK = 1 ] && mkdir dist && : > dist/kvfast-1.2.0.tar.gz",
    "ci/test_wheel.sh": '[ "$*" = "dist -n 2" ] && : > "$REPORT"',
    "bin/python": 'case "$*" in *"-m cibuildwheel "*) : > dist/a.whl;; ci/*) [ -e "$SOURCES/$1" ] && [ -e "${@: -1}" ];; esac',
}
MODULES = ("a.cpython-313-darwin.so", "a.cpython-314t-x86_64-linux-musl.so", "a.abi3.so", "a.cp314t-win_amd64.pyd")


def test_actions_are_pinned_and_rights_are_few():
    uses = re.findall("uses: (.*)", TEXT)
    assert len(uses) > 10 and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in uses)
    assert len(set(uses)) == len({one.partition("@")[0] for one in uses}) and TEXT.count("persist-credentials: false") == 2
    assert RELEASE["permissions"] == {"contents": "read"}
    assert [name for name, job in RELEASE["jobs"].items() if "permissions" in job] == ["publish"]
    publish = RELEASE["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"} and "ci/" not in str(publish["steps"])
    assert (publish["environment"], publish["needs"], publish["if"]) == ("index", "wheels", "startsWith(github.ref, 'refs/tags/v')")


@pytest.mark.skipif(os.name != "posix", reason="the steps are of bash")
def test_steps_run_and_leave_what_is_uploaded(tmp_path):
    for name, text in {**STUBS, "ci/wheels.sh": (ROOT / "ci" / "wheels.sh").read_text()}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
        assert name == "bin/python" or os.access(ROOT / name, os.X_OK)
    known = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SOURCES": str(ROOT)}
    for step in (step for job in RELEASE["jobs"].values() for step in job["steps"]):
        assert "upload-artifact" not in str(step) or list(tmp_path.glob(step["with"]["path"])), step
        for tag in ("v1.2.0", "v1.3.0") if "GITHUB_REF_NAME" in str(step) else ("v1.2.0",):
            code = subprocess.call(["bash", "-ec", step.get("run", "")], cwd=tmp_path, env={**known, "GITHUB_REF_NAME": tag})
            assert (code == 0) is (tag == "v1.2.0"), step


def test_what_is_written_twice_is_the_same(monkeypatch):
    project = pytest.importorskip("tomllib", reason="Python 3.11").loads((ROOT / "pyproject.toml").read_text("utf-8"))
    ours, script = project["project"], (ROOT / "ci" / "test_wheel.sh").read_text("utf-8")
    monkeypatch.setattr(cli, "_later", lambda module, name: lambda args: None)
    assert cli.main(re.search("python -m kvfast (bench .*)", script)[1].split()) == 0
    command = re.search('pip install -e "[.](.*)" && pytest (-n 2)', (ROOT / "README.md").read_text("utf-8"))
    assert command[1] in script and f"dist {command[2]}" in (ROOT / "ci" / "wheels.sh").read_text("utf-8")
    recipe, python = (ROOT / "ci" / "conda" / "recipe.yaml").read_text("utf-8"), f"python{ours['requires-python']}"
    needed = [name for name in ours["dependencies"] if ";" not in name]
    told = [f"version: {ours['version']}", f"summary: {ours['description']}", f"license: {ours['license']}"]
    told += [f"host: [{','.join([python, 'pip', *project['build-system']['requires']])}]", f"run: [{','.join([python, *needed])}]"]
    told += [f"entry_points: [{','.join(map('='.join, ours['scripts'].items()))}]"]
    assert {line.replace(" ", "") for line in told} <= set(re.sub('[ "]', "", recipe).splitlines())
    dist = runpy.run_path(str(ROOT / "ci" / "dist.py"))
    assert dist["MAX_BYTES"] < 10_000_000 and {dist["MODULES"].sub("", name) for name in MODULES} == {"a"}
