"""Says at the end of a run what it left out because an extra is not installed.

With the names of extras in KVFAST_TEST_EXPECTS, as in ``KVFAST_TEST_EXPECTS="llama test" pytest``, the run fails if any test
was left out for one of them.
"""

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

# Extras of pyproject.toml, and the packages by whose absence tests tell that one is missing. A package that several extras have
# stands with one of them.
EXTRAS = {
    "files": "safetensors|xxhash",
    "llama": "gguf|tokenizers|rich|threadpoolctl",
    "redis": "redis",
    "cloud": "obstore",
    "encrypted": "cryptography",
    "cloud-test": "moto",
    "plot": "matplotlib",
    "test": "Cython|setuptools|ml_dtypes|sybil",
    "types": "mypy",
    "docs": "sphinx",
    "torch": "torch",
    "transformers": "transformers",
    "vllm": "vllm|PIL",
    "llama-cpp": "llama_cpp|llama-cpp-python",
    "serve": "fastapi|uvicorn|prometheus_client",
}


def extra_of(reason):
    """The extra whose absence is the reason of a skip, or None."""
    for extra, packages in EXTRAS.items():
        told = rf"could not import '({packages})\b|\b({packages})\b.* is not installed|kvfast\[{extra}\]|\b{extra} extra\b|\bextra {extra}\b"
        if re.search(told, reason, re.IGNORECASE):
            return extra
    return None


def left_out(stats):
    """{extra: [files of which no test ran, number of tests left out in other files]} by the reports of a run."""
    ran = {file_of(report) for kind in ("passed", "failed", "error", "xfailed", "xpassed") for report in stats.get(kind, ())}
    found = defaultdict(lambda: [set(), 0])
    for report in stats.get("skipped", ()):
        if extra := extra_of(report.longrepr[2]):
            if file_of(report) in ran:
                found[extra][1] += 1
            else:
                found[extra][0].add(file_of(report))
    return found


def file_of(report):
    return report.nodeid.partition("::")[0]


def folded(files, root):
    """The files as text, in which a folder stands for all of its test files."""
    names = set()
    for file in files:
        folder = Path(file).parent
        every = {str(path.relative_to(root)) for path in (root / folder).glob("test_*.py")}
        names.add(f"{folder}/" if every <= files else file)
    return ", ".join(sorted(names))


def expected():
    """The extras that must be installed."""
    names = os.environ.get("KVFAST_TEST_EXPECTS", "").split()
    if unknown := set(names) - EXTRAS.keys():
        raise pytest.UsageError(f"KVFAST_TEST_EXPECTS names extras that tests do not know: {sorted(unknown)}; they know {[*EXTRAS]}")
    return names


def pytest_configure(config):
    expected()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A module that is left out stands with its own path, where pytest-xdist shows each place of a skip once."""
    report = yield
    if report.skipped:
        report.longrepr = (str(collector.path), 1, report.longrepr[2])
    return report


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and session.exitstatus in (0, 5) and any(extra in left_out(reporter.stats) for extra in expected()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter, config):
    yield
    found = left_out(terminalreporter.stats)
    for extra, (files, tests) in sorted(found.items()):
        told = [folded(files, config.rootpath)] * bool(files) + [f"{tests} tests of other files"] * bool(tests)
        must = ", which KVFAST_TEST_EXPECTS names" if extra in expected() else ""
        terminalreporter.write_line(f"without the extra {extra}{must}, this run left out {' and '.join(told)}", red=bool(must))
