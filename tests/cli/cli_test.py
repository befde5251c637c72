"""The command line as people use it: results on stdout, the rest on stderr, documented exit codes.

Usage: cli_test.py CALLA SOURCE_DIR
"""
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.dom.minidom

CALLA, SOURCE = sys.argv[1], sys.argv[2]
TINY = os.path.join(SOURCE, "models", "calla-tiny")
RANDOM = os.path.join(SOURCE, "tests", "data", "tiny-random")


def calla(*args, stdin="", timeout=120, env=None):
    environment = {k: v for k, v in os.environ.items() if k != "CALLA_MODEL"}
    environment.update(env or {})
    return subprocess.run([CALLA, *args], input=stdin, capture_output=True, text=True, timeout=timeout, env=environment)


class Help(unittest.TestCase):
    def test_every_command_has_help(self):
        top = calla("--help")
        self.assertEqual(top.returncode, 0)
        for command in ["chat", "run", "bench", "eval", "inspect", "tokenize", "selftest", "make-checkpoint"]:
            self.assertIn(command, top.stdout)
            self.assertEqual(calla(command, "--help").returncode, 0, command)

    def test_usage_errors_exit_2(self):
        for args in [[], ["nonsense"], ["run"], ["run", "x", "--temp", "-1"], ["run", "x", "--backend", "gpu"],
                     ["run", "x", "--model", "/does/not/exist"], ["eval"], ["bench", "--prompts", "0"],
                     ["run", "x", "--ablate", "nothing-of-that-name"], ["run", "x", "--ablate", "all"],
                     ["bench", "--ablate", "all", "--ablate", "avx512"], ["bench", "--ablate", "all", "-b", "reference"]]:
            result = calla(*args)
            self.assertEqual(result.returncode, 2, (args, result.stderr))
            self.assertEqual(result.stdout, "", args)
            self.assertNotEqual(result.stderr, "", args)


class Run(unittest.TestCase):
    def test_answers(self):
        result = calla("run", "--no-think", "--greedy", "What is a kangaroo?")
        self.assertEqual(result.returncode, 0)
        self.assertTrue(result.stdout.startswith("A kangaroo is any of several herbivorous leaping marsupials"))
        self.assertIn("tokens/s", result.stderr)

    def test_json_and_seed(self):
        a = json.loads(calla("run", "--json", "--seed", "7", "Define happy.").stdout)
        b = json.loads(calla("run", "--json", "--seed", "7", "-t", "1", "-", stdin="Define happy.").stdout)
        self.assertEqual(a["content"], b["content"])
        self.assertEqual(a["reasoning"], b["reasoning"])
        self.assertEqual(a["seed"], 7)
        self.assertEqual(a["finish_reason"], "stop")
        self.assertNotEqual(a["reasoning"], "")

    def test_length_and_stop(self):
        cut = json.loads(calla("run", "--json", "--greedy", "--no-think", "-n", "5", "What is a kangaroo?").stdout)
        self.assertEqual((cut["finish_reason"], cut["generated_tokens"]), ("length", 5))
        stop = json.loads(calla("run", "--json", "--greedy", "--no-think", "--stop", "herb", "What is a kangaroo?").stdout)
        self.assertEqual(stop["content"], "A kangaroo is any of several ")
        self.assertEqual(stop["finish_reason"], "stop")

    def test_raw_and_quiet(self):
        result = calla("run", "--raw", "--greedy", "-q", "-n", "8", "In the beginning")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertNotEqual(result.stdout.strip(), "")

    def test_too_long_a_prompt_is_refused_with_both_numbers(self):
        result = calla("run", "--raw", "-c", "64", "-", stdin="word " * 500)
        self.assertEqual(result.returncode, 2)
        self.assertIn("64", result.stderr)
        self.assertRegex(result.stderr, r"\d{3,} tokens")

    def test_odd_unicode(self):
        for text in ["\u0000x", "👩‍💻 é", "שלום", "\ufffd", "<|im_end|>", " "]:
            self.assertEqual(calla("run", "--no-think", "-n", "4", "-", stdin=text).returncode, 0, repr(text))
        invalid = subprocess.run([CALLA, "run", "--no-think", "-n", "4", "-"], input=b"\xff\xfe abc", capture_output=True)
        self.assertIn(invalid.returncode, (0, 2))

    def test_sigint_ends_with_130(self):
        process = subprocess.Popen([CALLA, "run", "--raw", "-b", "reference", "-n", "4000", "once upon a time"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=30), 130)
        process.stdout.close()
        process.stderr.close()


class Chat(unittest.TestCase):
    def test_commands_and_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            saved = os.path.join(folder, "talk.json")
            lines = ["/system You are brief.", "/think off", "What is a kangaroo?", "What is 3 plus 4?", "/stats",
                     f"/save {saved}", "/reset", "/nonsense", "/quit"]
            result = calla("chat", "--greedy", stdin="\n".join(lines) + "\n")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("kangaroo", result.stdout)
            self.assertIn("cached", result.stderr)
            self.assertIn("no command /nonsense", result.stderr)
            with open(saved, encoding="utf-8") as file:
                self.assertEqual([m["role"] for m in json.load(file)], ["system", "user", "assistant", "user", "assistant"])

    def test_ctrl_c_stops_the_answer_only(self):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(CALLA, [CALLA, "chat", "-b", "reference", "--no-think"])
        output = b""

        def read_until(text, seconds=60):
            nonlocal output
            end = time.time() + seconds
            while text not in output and time.time() < end:
                try:
                    output += os.read(terminal, 4096)
                except OSError:
                    break
            self.assertIn(text, output)
            output = output.split(text, 1)[1]

        read_until(b"> ")
        os.write(terminal, b"What is a kangaroo?\n")
        read_until(b"A kang")
        os.write(terminal, b"\x03")
        read_until(b"(stopped)")
        read_until(b"> ")
        os.write(terminal, b"/quit\n")
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)


class Tools(unittest.TestCase):
    def test_tokenize(self):
        ids = json.loads(calla("tokenize", "--ids", "<|im_end|>").stdout)
        self.assertEqual(ids, [4089])
        self.assertGreater(len(json.loads(calla("tokenize", "--ids", "--plain", "<|im_end|>").stdout)), 1)
        self.assertEqual(calla("tokenize", "--count", "").stdout.strip(), "0")

    def test_inspect(self):
        report = calla("inspect", TINY)
        self.assertEqual(report.returncode, 0)
        self.assertIn("Qwen3_5Moe", report.stdout)
        json.loads(calla("inspect", "--json", "--tensors", TINY).stdout)
        self.assertEqual(calla("inspect", "--verify", TINY).returncode, 0)

    def test_damaged_checkpoints_exit_3(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, "model")
            shutil.copytree(TINY, copy)
            weights = os.path.join(copy, "model.safetensors")
            with open(weights, "r+b") as file:
                file.truncate(os.path.getsize(weights) - 1)
            result = calla("run", "x", "--model", copy)
            self.assertEqual(result.returncode, 3)
            self.assertIn("model.safetensors", result.stderr)
            with open(weights, "r+b") as file:
                file.write(struct.pack("<Q", 1 << 63))
            self.assertEqual(calla("inspect", copy).returncode, 3)
            with open(os.path.join(copy, "tokenizer.json"), "w", encoding="utf-8") as file:
                file.write("{")
            shutil.copy(os.path.join(TINY, "model.safetensors"), weights)
            self.assertEqual(calla("run", "x", "--model", copy).returncode, 3)

    def test_eval(self):
        result = calla("eval", "--golden", os.path.join(RANDOM, "golden.safetensors"), "--model", RANDOM, "--json")
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual(json.loads(result.stdout)["failed"], 0)
        # The golden file of another model is out of tolerance.
        self.assertEqual(calla("eval", "--golden", os.path.join(RANDOM, "golden.safetensors"), "--model", TINY).returncode, 1)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
            text.write("A kangaroo is a marsupial. " * 20)
            text.flush()
            result = json.loads(calla("eval", "--text", text.name, "--json").stdout)
            self.assertLess(result["perplexity"], 40)

    def test_make_checkpoint_and_bench(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "made")
            self.assertEqual(calla("make-checkpoint", "--shape", "calla-tiny", "--layers", "4", "--seed", "3", out).returncode, 0)
            self.assertNotEqual(calla("make-checkpoint", "--shape", "calla-tiny", out).returncode, 0)  # it exists
            svg, report = os.path.join(folder, "plot.svg"), os.path.join(folder, "bench.json")
            result = calla("bench", "--model", out, "--prompts", "16,64", "--contexts", "0,100", "-r", "1",
                           "--decode-tokens", "4", "--svg", svg, "--json-file", report)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("of limit", result.stdout)
            xml.dom.minidom.parse(svg)
            with open(report, encoding="utf-8") as file:
                self.assertEqual([p["prompt_tokens"] for p in json.load(file)["prefill"]], [16, 64])

    def test_bench_ablates_all(self):
        arguments = ["bench", "-b", "cpu", "--ablate", "all", "--prompts", "16,32", "--contexts", "0", "-r", "2",
                     "--decode-tokens", "2"]
        report = json.loads(calla(*arguments, "--json").stdout)
        self.assertEqual([row["mechanism"] for row in report["mechanisms"]], ["avx512"])
        points = report["mechanisms"][0]["points"]
        self.assertEqual([(p["phase"], p["tokens"]) for p in points], [("prefill", 16), ("prefill", 32), ("decode", 0)])
        for p in points:
            self.assertAlmostEqual(p["gain"], p["with_tokens_per_s"] / p["without_tokens_per_s"] - 1)
        table = calla(*arguments)
        self.assertEqual(table.returncode, 0, table.stderr)
        self.assertRegex(table.stdout, r"mechanism +prefill of 16 +prefill of 32 +decode at 0 +Lily's figure")
        self.assertRegex(table.stdout, r"\navx512 .*%  -\n")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
