#!/usr/bin/env bash
# ci/release.sh VERSION: makes a release of the last commit. In a clone it sets version and date, and builds and tests the sdist and the
# wheel (ci/wheel.sh). Only then come the commit, its tag, and dist/ with checksums. CONTRIBUTING.md says what is left to do by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD version=${1:-}
refuse() { echo "$*" >&2; exit 2; }
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] || refuse "expected a version such as 1.2.0 or 1.2.0rc1, got '$version'"
[ -z "$(git status --porcelain)" ] || refuse "commit or remove first: $(git status --porcelain | head -5)"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || refuse "there is a tag v$version already: choose another version"
grep -qx "## $version (unreleased)" CHANGELOG.md || refuse "CHANGELOG.md must have a section '## $version (unreleased)'"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet . "$work/kvfast"
cd "$work/kvfast"
files=(pyproject.toml kvfast/__init__.py ci/conda/recipe.yaml)
sed -i -E "s/^(version =|__version__ =|  version:) \".*\"$/\1 \"$version\"/" "${files[@]}"
sed -i "s/^## $version (unreleased)$/## $version ($(date +%Y-%m-%d))/" CHANGELOG.md
for file in "${files[@]}"; do
    grep -q "version.* \"$version\"" $file || refuse "$file has no line for the version"
done
git config user.name "$(git -C "$root" log -1 --format=%cn)"
git config user.email "$(git -C "$root" log -1 --format=%ce)"
git commit --quiet --all --message "release: $version"
git tag --annotate "v$version" --message "kvfast $version"
ci/wheel.sh
(cd dist && sha256sum -- * >SHA256SUMS)

cd "$root"
git pull --quiet --ff-only "$work/kvfast" HEAD
git fetch --quiet "$work/kvfast" "refs/tags/v$version:refs/tags/v$version"
rm -rf dist
cp -r "$work/kvfast/dist" .
echo "kvfast $version: a commit, the tag v$version, and in dist/:"
cat dist/SHA256SUMS
echo 'Left to do by hand: "Publish" in CONTRIBUTING.md'
