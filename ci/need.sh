#!/usr/bin/env bash
# ci/need.sh NAME PACKAGE...: Debian's packages, where there is no command or file of that name and root asks; else nothing.
set -euo pipefail
if command -v "$1" >/dev/null || [ -e "$1" ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then exit 0; fi
# Lists of packages are fetched where there are none or they are too old, and not once a package.
install() { apt-get install -y --no-install-recommends "$@"; }
# One at a time: apt-get fails while another runs.
{ flock 9 && { install "${@:2}" || { apt-get update && install "${@:2}"; }; }; } >/dev/null 2>&1 9<"$0" || echo "cannot install ${*:2}" >&2
