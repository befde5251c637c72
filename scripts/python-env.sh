#!/bin/sh
# Makes .venv with the packages that the server's suite needs (the official SDKs, pytest). Without a network it says so,
# and that suite is left out.
set -eu
wanted=tests/server/requirements.txt
[ -e .venv/done ] && [ .venv/done -nt "$wanted" ] && exit 0
echo "python-env: making .venv with $(tr '\n' ' ' <$wanted)"
if python3 -m venv .venv && .venv/bin/pip install -q --disable-pip-version-check -r "$wanted"; then
  touch .venv/done
else
  echo "python-env: the packages cannot be had; the server's suite is left out" >&2
fi
