#!/usr/bin/env bash
# ci/wheels.sh REPORT: the wheels of a release for this system and processor, into dist/, by cibuildwheel, which tries each with some tests
# (pyproject.toml; on Linux it needs Docker). Then what they hold is checked, and the suite of the sdist, which dist/ has already, runs on
# the wheel for this Python. REPORT is the file for what `bench` measures. .github/workflows/release.yml runs this on each system.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install --quiet cibuildwheel==4.3.5
python -m cibuildwheel --archs native --output-dir dist
python ci/dist.py dist/*
[ "$(uname)" != Linux ] || python ci/audit_instructions.py dist/*.whl
REPORT=$PWD/$1 PYTHON=python ci/test_wheel.sh dist -n 2
