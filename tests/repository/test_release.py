"""ci/release.sh, in a small repository whose ci/wheel.sh does little."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from selection import needs_sources

pytestmark = needs_sources
ROOT = Path(__file__).parents[2]
WHEEL = "#!/bin/bash\nset -e\ngrep -q '1.2.0' pyproject.toml\nmkdir -p dist\necho built > dist/kvfast-1.2.0.whl\n"


def git(folder, *arguments):
    who = "-c", "user.name=Somebody", "-c", "user.email=somebody@localhost"
    return subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def release(folder, *arguments):
    return subprocess.run([folder / "ci" / "release.sh", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path):
    if not shutil.which("git"):
        pytest.skip("needs git")
    folder = tmp_path / "kvfast"
    for name in ("ci/conda", "kvfast"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "ci" / "release.sh", folder / "ci")
    (folder / "ci" / "wheel.sh").write_text(WHEEL)
    (folder / "ci" / "wheel.sh").chmod(0o755)
    for name, text in {
        "pyproject.toml": '[project]\nname = "kvfast"\nversion = "1.1.0"\n',
        "kvfast/__init__.py": '__version__ = "1.1.0"\n',
        "ci/conda/recipe.yaml": 'context:\n  version: "1.1.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (unreleased)\n\n- New.\n\n## 1.1.0 (2020-01-01)\n",
        ".gitignore": "dist/\n",
    }.items():
        (folder / name).write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "start")
    return folder


def test_a_release_is_a_commit_a_tag_and_checksums(repository):
    done = release(repository, "1.2.0")
    assert done.returncode == 0, done.stderr
    assert git(repository, "log", "-1", "--format=%s") == "release: 1.2.0"
    assert git(repository, "rev-parse", "v1.2.0^{commit}") == git(repository, "rev-parse", "HEAD")
    assert not git(repository, "status", "--porcelain")
    assert 'version = "1.2.0"' in (repository / "pyproject.toml").read_text()
    assert (repository / "kvfast/__init__.py").read_text() == '__version__ = "1.2.0"\n'
    assert (repository / "ci/conda/recipe.yaml").read_text() == 'context:\n  version: "1.2.0"\n'
    assert "1.2.0 (2" in (repository / "CHANGELOG.md").read_text()
    digest = hashlib.sha256((repository / "dist/kvfast-1.2.0.whl").read_bytes()).hexdigest()
    assert (repository / "dist/SHA256SUMS").read_text() == f"{digest}  kvfast-1.2.0.whl\n"
    assert "there is a tag v1.2.0 already" in release(repository, "1.2.0").stderr


@pytest.mark.parametrize(
    ("version", "message"),
    [("", "expected a version such as"), ("v1.2", "got 'v1.2'"), ("1.3.0", "must have a section '## 1.3.0 (unreleased)'")],
)
def test_what_is_refused(repository, version, message):
    done = release(repository, version)
    assert done.returncode == 2
    assert message in done.stderr


def test_changes_that_are_not_committed_are_refused(repository):
    (repository / "more.txt").write_text("more")
    assert "commit or remove first: ?? more.txt" in release(repository, "1.2.0").stderr


def test_a_failure_leaves_nothing(repository):
    (repository / "ci/wheel.sh").write_text("#!/bin/bash\nexit 3\n")
    git(repository, "commit", "--quiet", "--all", "--message", "a test that fails")
    before = git(repository, "rev-parse", "HEAD")
    assert release(repository, "1.2.0").returncode == 3
    assert (
        git(repository, "rev-parse", "HEAD") == before and not git(repository, "tag") and not git(repository, "status", "--porcelain")
    )
