#!/usr/bin/env python3
"""msl_check finds what nonconforming.metal plants, at each line that says `expect:`, and nothing else."""
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PLANTED = os.path.join(HERE, "..", "..", "tests", "softmetal", "kernels", "nonconforming.metal")


def main():
    result = subprocess.run([sys.executable, os.path.join(HERE, "msl_check.py"), PLANTED, *sys.argv[1:]],
                            capture_output=True, text=True)
    if result.returncode == 77:
        print(result.stdout)
        return 77
    found = {}
    for line in result.stdout.splitlines():
        match = re.match(r".*nonconforming\.metal:(\d+): (.*)", line)
        if match:
            found.setdefault(int(match.group(1)), []).append(match.group(2))
    failures = 0
    with open(PLANTED, encoding="utf-8") as f:
        for number, text in enumerate(f, 1):
            wanted = re.search(r"// expect: (.*)", text)
            messages = found.pop(number, [])
            if wanted and not any(wanted.group(1) in m for m in messages):
                print(f"line {number}: expected \"{wanted.group(1)}\", found {messages}")
                failures += 1
            elif messages and not wanted:
                print(f"line {number}: unexpected {messages}")
                failures += 1
    if result.returncode != 1:
        print(f"exit status {result.returncode}, expected 1\n{result.stdout}{result.stderr}")
        failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
