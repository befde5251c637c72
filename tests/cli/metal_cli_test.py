"""The metal backend from the command line, on the software device: it answers, says what it is, and is never a default.

Usage: metal_cli_test.py CALLA SOURCE_DIR
"""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

CALLA, SOURCE = sys.argv[1], sys.argv[2]
ANSWER = "A kangaroo is any of several herbivorous leaping marsupials of Australia and New Guinea"


def calla(*args, stdin="", timeout=600, **environment):
    kept = {k: v for k, v in os.environ.items() if k != "CALLA_MODEL" and not k.startswith("SOFTMETAL_")}
    return subprocess.run([CALLA, *args], input=stdin, capture_output=True, text=True, timeout=timeout,
                          env={**kept, **environment})


class Default(unittest.TestCase):
    def test_auto_is_no_software_device(self):
        result = calla("run", "-n", "1", "--backend", "auto", "hi")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("(cpu:", result.stderr)
        self.assertIn("metal (a software device here)", calla("run", "--help").stdout)


    def test_one_precision(self):
        for command in (["run", "hi"], ["selftest"]):
            result = calla(*command, "--backend", "metal", "--full-precision")
            self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
            self.assertIn("--full-precision: the metal backend has one precision", result.stderr)


class Answers(unittest.TestCase):
    def test_chat_in_both_forms(self):
        for chip, form in [("m5max", "tensor operations"), ("m4max", "simdgroup matrices")]:
            result = calla("chat", "--backend", "metal", "--greedy", "--no-think", "-n", "24",
                           stdin="What is a kangaroo?\n/quit\n", SOFTMETAL_DEVICE=chip)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(ANSWER[:60], result.stdout)
            self.assertIn("computed in software (softmetal), memory checks off", result.stderr)
            self.assertIn("GEMM with " + form + "; slow", result.stderr)

    def test_a_second_turn_reads_only_what_is_new(self):
        result = calla("chat", "--backend", "metal", "--greedy", "--no-think", "-n", "6",
                       stdin="Define happy.\nWhat is 3 plus 4?\n/stats\n/quit\n")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, r"[1-9]\d* cached")

    def test_the_same_tokens_as_the_cpu(self):
        arguments = ["run", "--json", "--greedy", "--no-think", "-n", "12", "Define happy."]
        metal, cpu = (json.loads(calla(*arguments, "--backend", name).stdout) for name in ("metal", "cpu"))
        self.assertEqual((metal["backend"], cpu["backend"]), ("metal", "cpu"))
        self.assertEqual(metal["content"], cpu["content"])

    def test_under_every_check(self):
        result = calla("run", "--backend", "metal", "--greedy", "--no-think", "-n", "3", "hi", SOFTMETAL_CHECK="1",
                       SOFTMETAL_STRICT_BINDINGS="1")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("memory checks on", result.stderr)
        self.assertNotIn("softmetal:", result.stderr)


class OtherFiles(unittest.TestCase):
    """calla-tiny in files that differ from the one that is shipped."""

    def run_changed(self, change, backend):
        """Runs a copy whose header (padded to any length) and tensors' bytes `change(header, data)` has edited."""
        tiny = os.path.join(SOURCE, "models", "calla-tiny")
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, "model")
            shutil.copytree(tiny, copy)
            path = os.path.join(copy, "model.safetensors")
            with open(path, "rb") as file:
                size = struct.unpack("<Q", file.read(8))[0]
                header, data = file.read(size), bytearray(file.read())
            header = change(header, data)
            with open(path, "wb") as file:
                file.write(struct.pack("<Q", len(header)) + header + data)
            return calla("run", "--backend", backend, "-m", copy, "--greedy", "--no-think", "-n", "8",
                         "What is a kangaroo?")

    def test_tensors_at_any_address(self):
        for padding in (1, 2, 4, 6):
            result = self.run_changed(lambda header, data: header + b" " * padding, "metal")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(ANSWER[:20], result.stdout)

    def test_a_nan_in_a_router_is_no_answer(self):
        def damage(header, data):
            begin = json.loads(header)["language_model.model.layers.0.mlp.gate.scales"]["data_offsets"][0]
            data[begin:begin + 2] = b"\xc0\x7f"
            return header

        for backend in ("cpu", "metal"):
            result = self.run_changed(damage, backend)
            self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
            self.assertIn("not finite", result.stderr)


class Measures(unittest.TestCase):
    def test_selftest_reports(self):
        result = calla("selftest", "--backend", "metal")
        self.assertEqual(result.returncode, 0, result.stdout)
        for line in [r"machine: \w+ .*cores", r"backend: metal: Apple M5 Max .* in software", r"attend -> mixed +\d.*ok",
                     r"passage +logits .*ok", r"read bandwidth, measured +[\d.,]+ GB/s",
                     r"calla-tiny, decode, measured +[\d.,]+ tokens/s", r"calla-tiny, decode, predicted",
                     r"Qwen3.6-35B-A3B at 4K, decode, predicted +[\d.,]+ tokens/s \(1.88 GB a token", r"all right in"]:
            self.assertRegex(result.stdout, line)

    def test_bench_ablates_every_mechanism(self):
        result = calla("bench", "--backend", "metal", "--ablate", "all", "--prompts", "9", "--contexts", "0", "-r", "1",
                       "--decode-tokens", "1", "--chunk", "16", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = {row["mechanism"]: row for row in json.loads(result.stdout)["mechanisms"]}
        with open(os.path.join(SOURCE, "docs", "metal.md"), encoding="utf-8") as file:
            documented = re.findall(r"^\|[^|]*\|[^|]*\| `([a-z][a-z-]+)` \|", file.read(), re.M)
        self.assertEqual(sorted(rows), sorted(documented))
        self.assertIn("+77.4 % at 512", rows["fused-dequant"]["lily"])
        self.assertEqual([(p["phase"], p["tokens"]) for p in rows["split-kv"]["points"]], [("prefill", 9), ("decode", 0)])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
