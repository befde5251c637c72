#!/bin/sh
# Installs what building Calla needs and is missing. Debian/Ubuntu: distribution packages; macOS: Homebrew.
# Says what it does before it does it, and does nothing if all is there. `setup.sh check` adds the tools of `make check`.
set -eu

want=${1:-build}

if [ "$(uname)" = Darwin ]; then
  command -v brew >/dev/null || { echo "setup: Homebrew is needed to install libraries: https://brew.sh" >&2; exit 1; }
  packages="cmake ninja pkg-config highway nlohmann-json cli11 pcre2 utf8proc curl openssl libedit xxhash googletest google-benchmark"
  missing=""
  for p in $packages; do brew list --formula "$p" >/dev/null 2>&1 || missing="$missing $p"; done
  [ -z "$missing" ] && exit 0
  echo "setup: brew install$missing"
  # shellcheck disable=SC2086
  exec brew install $missing
fi

command -v dpkg-query >/dev/null || {
  echo "setup: neither Debian/Ubuntu nor macOS. Install by hand what docs/dependencies.md lists, then run cmake." >&2
  exit 1
}
packages="g++ cmake ninja-build pkg-config libhwy-dev nlohmann-json3-dev libcli11-dev libpcre2-dev
  libutf8proc-dev libcurl4-openssl-dev libssl-dev libedit-dev libxxhash-dev libgtest-dev libgmock-dev libbenchmark-dev
  libboost-context-dev python3 python3-venv"
[ "$want" = check ] && packages="$packages clang clang-format-14 clang-tidy-14"
missing=""
for p in $packages; do
  dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
echo "setup: installing$missing"
sudo=""
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "setup: run as root, or install sudo" >&2; exit 1; }
  sudo=sudo
fi
$sudo apt-get update -qq || echo "setup: apt-get update failed; trying with the package lists at hand" >&2
# shellcheck disable=SC2086
exec $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
