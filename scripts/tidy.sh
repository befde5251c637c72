#!/bin/sh
# Runs clang-tidy (.clang-tidy) over the project's own sources. Usage: scripts/tidy.sh BUILD_DIR JOBS
set -eu
build=$1
jobs=$2
git ls-files 'src/*.cc' | grep -v -e '^src/backend/cuda/' -e '^src/backend/metal/' |
  xargs -P "$jobs" -n 1 clang-tidy-14 -p "$build" --quiet --warnings-as-errors='*' --extra-arg-before=-Wno-unknown-warning-option 2>/dev/null
