"""What a program with the CUDA backend says when there is no usable card, on an imitated driver (imitated_driver.cc).

Usage: cuda_cli_test.py CALLA FOLDER_OF_THE_IMITATED_LIBCUDA
"""
import os
import subprocess
import sys
import unittest

CALLA, DRIVER = sys.argv[1], sys.argv[2]
NO_DEVICE, DRIVER_MISMATCH = "100", "803"


def calla(*args, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("CALLA_MODEL", "CUDA_VISIBLE_DEVICES")}
    return subprocess.run([CALLA, *args], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
                          env={**kept, "LD_LIBRARY_PATH": DRIVER, **environment})


class NoCard(unittest.TestCase):
    def refused(self, **environment):
        result = calla("run", "-b", "cuda", "hi", **environment)
        self.assertEqual((result.returncode, result.stdout), (4, ""), result.stderr)
        self.assertRegex(result.stderr, r"^calla: backend 'cuda' is not available: [^\n]+\n$")
        return result.stderr

    def test_no_driver(self):
        message = self.refused(IMITATED_VERSION="0")
        self.assertIn("no NVIDIA driver is found; install one for CUDA 1", message)

    def test_a_driver_older_than_the_toolkit(self):
        message = self.refused(IMITATED_VERSION="12040")
        self.assertRegex(message, r"the NVIDIA driver is for CUDA up to 12\.4, but this build is for 1[3-9]\.\d; update the driver")

    def test_no_card(self):
        message = self.refused(IMITATED_VERSION="99000", IMITATED_INIT=NO_DEVICE)
        self.assertIn("no NVIDIA GPU is found; check nvidia-smi", message)

    def test_hidden_cards(self):
        for hidden in ("", "7"):
            message = self.refused(IMITATED_VERSION="99000", IMITATED_INIT=NO_DEVICE, CUDA_VISIBLE_DEVICES=hidden)
            self.assertIn(f'no NVIDIA GPU is found with CUDA_VISIBLE_DEVICES="{hidden}"; unset it', message)

    def test_a_broken_installation(self):
        message = self.refused(IMITATED_VERSION="99000", IMITATED_INIT=DRIVER_MISMATCH)
        self.assertIn("the NVIDIA GPU cannot be used: system has unsupported display driver", message)

    def test_auto_says_that_it_takes_the_cpu(self):
        for args in (["run", "--no-think", "-n", "1", "hi"], ["run", "-q", "--no-think", "-n", "1", "hi"],
                     ["bench", "-q", "--prompts", "16", "--contexts", "16", "--decode-tokens", "2", "-r", "1"],
                     ["eval", "-q", "--text", __file__], ["selftest", "-q"]):
            result = calla(*args, IMITATED_VERSION="12040")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("warning: running on the cpu backend, not on cuda: the NVIDIA driver is for CUDA up to 12.4",
                          result.stderr, args)
            result = calla(*args, "-b", "cpu", IMITATED_VERSION="12040")
            self.assertNotIn("not on cuda", result.stderr, args)

    def test_only_what_needs_to_know_asks_the_driver(self):
        for args in (["--version"], ["--help"], ["nonsense"], ["run", "--nonsense"], ["inspect"]):
            result = calla(*args, IMITATED_VERSION="12040", IMITATED_TELLS="1")
            self.assertNotIn("the driver is asked", result.stderr, args)
        for command in ("run", "bench"):
            result = calla(command, "--help", IMITATED_VERSION="12040", IMITATED_TELLS="1")
            self.assertIn("the driver is asked", result.stderr)
            self.assertIn("cuda (not here)", " ".join(result.stdout.split()))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
