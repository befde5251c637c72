"""The command line as people use it: results on stdout, the rest on stderr, documented exit codes.

Usage: cli_test.py CALLA SOURCE_DIR
"""
import contextlib
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


@contextlib.contextmanager
def model_copy():
    """A directory with the bundled model, to be spoilt."""
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "model")
        shutil.copytree(TINY, copy)
        yield copy


def calla(*args, stdin="", timeout=120, env=None):
    environment = {k: v for k, v in os.environ.items() if k != "CALLA_MODEL"}
    environment.update(env or {})
    return subprocess.run([CALLA, *args], input=stdin, capture_output=True, text=True, timeout=timeout, env=environment)


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def tensor_offset(path, name):
    """Where a tensor's bytes begin in a safetensors file."""
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        return 8 + length + json.loads(file.read(length))[name]["data_offsets"][0]


class Terminal:
    """calla in a pseudo-terminal."""

    def __init__(self, *args, **environment):
        self.pid, self.terminal = pty.fork()
        self.output = b""
        if self.pid == 0:
            os.environ.update({"TERM": "dumb", **environment})
            os.execv(CALLA, [CALLA, *args])

    def type(self, text):
        os.write(self.terminal, text.encode() if isinstance(text, str) else text)

    def expect(self, text, seconds=60):
        end = time.time() + seconds
        while text not in self.output and time.time() < end:
            try:
                self.output += os.read(self.terminal, 4096)
            except OSError:
                break
        before, found, self.output = self.output.partition(text)
        if not found:
            raise AssertionError(f"{text!r} did not come: {before!r}")

    def wait(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(status)


class Help(unittest.TestCase):
    def test_every_command_has_help(self):
        top = calla("--help")
        self.assertEqual(top.returncode, 0)
        for command in ["chat", "run", "bench", "eval", "inspect", "tokenize", "selftest", "make-checkpoint"]:
            self.assertIn(command, top.stdout)
            self.assertEqual(calla(command, "--help").returncode, 0, command)
        self.assertRegex(calla("bench", "--help").stdout, r"--ablate can switch off:(?s:.*)\n  cpu: avx512\n")

    def test_usage_errors_exit_2(self):
        for args in [[], ["nonsense"], ["run"], ["run", "x", "--temp", "-1"], ["run", "x", "--backend", "gpu"],
                     ["run", "x", "--model", "/does/not/exist"], ["eval"], ["bench", "--prompts", "0"],
                     ["run", "x", "--ablate", "nothing-of-that-name"], ["run", "x", "--ablate", "all"],
                     ["bench", "--ablate", "all", "--ablate", "avx512"], ["bench", "--ablate", "all", "-b", "reference"],
                     ["run", "x", "--min-p", "nan"], ["bench", "--layers", "2"], ["make-checkpoint", "."],
                     ["serve", "--cache-gb", "0", "--cache-dir", "/tmp/never-made"],
                     ["run", "x", "--temp", "hot"], ["run", "x", "--seed", "-1"], ["run", "x", "--greedy", "--temp", "1"],
                     ["run", "x", "--seed", "99999999999999999999"], ["run", "x", "-m", ""], ["inspect", ""],
                     ["make-checkpoint", "/tmp/never-made", "--seed", "-1"], ["make-checkpoint", ""],
                     ["bench", "--json-file", ""], ["bench", "--json-file", "/tmp/one", "--svg", "/tmp/one"],
                     ["serve", "--api-key", ""], ["serve", "--host", ""], ["tokenize", "x", "-m", ""],
                     ["run", "x", "--stop", ""], ["eval", "--text", CALLA], ["run", "x", "--model", "y" * 5000]]:
            result = calla(*args)
            self.assertEqual(result.returncode, 2, (args, result.stderr))
            self.assertEqual(result.stdout, "", args)
            self.assertNotEqual(result.stderr, "", args)

    def test_names_that_are_none_exit_2(self):
        with tempfile.TemporaryDirectory() as home:
            env = {"CALLA_HOME": home, "HF_ENDPOINT": "http://127.0.0.1:9"}
            for args in [["pull", "foo"], ["pull", "a/b", "--revision", "../x"], ["remove", "x"], ["remove", "a/b"],
                         ["remove", "../.."], ["eval", "--golden", os.path.join(home, "none")],
                         ["make-checkpoint", "--tokenizer-from", os.path.join(home, "none"), os.path.join(home, "made")]]:
                result = calla(*args, env=env)
                self.assertEqual((result.returncode, result.stdout), (2, ""), (args, result.stderr))
                self.assertRegex(result.stderr, r"^calla: [^\n]+\n$", args)
            for setting in [{"HF_ENDPOINT": "nonsense"}, {"HF_TOKEN": "a b"}, {"CALLA_HOME": "", "HOME": ""}]:
                result = calla("pull", "a/b", env={**env, **setting})
                self.assertEqual(result.returncode, 2, (setting, result.stderr))
            # A model that is there but cannot be removed is no mistake in the command.
            os.makedirs(os.path.join(home, "models", "a--b"))
            self.assertEqual(calla("remove", "a/b", env=env).returncode, 1)

    def test_a_backend_that_is_not_here_is_one_line_and_no_other_backend(self):
        text = " ".join(calla("run", "--help").stdout.split())
        missing = [name for name in ("cuda", "metal") if name + " (not here)" in text]
        for name in missing:
            for args in [["chat"], ["run", "hi"], ["serve", "-p", "0"], ["bench", "--synthetic", "qwen3.6-35b-a3b"],
                         ["bench", "--ablate", "all"], ["selftest"], ["eval", "--text", __file__]]:
                result = calla(*args, "-b", name)
                # 2: this build lacks it; 4: the device is not there.
                self.assertIn(result.returncode, (2, 4), (args, result.stderr))
                self.assertEqual(result.returncode == 2, "this build has no" in result.stderr, result.stderr)
                self.assertRegex(result.stderr, rf"^calla: backend '{name}' is not available: [^\n]+\n$")
        if not missing:
            self.skipTest("every backend is here")
        # `auto` says it when it goes past a backend that was built for this machine.
        built = [name for name in missing if calla("run", "hi", "-b", name).returncode == 4]
        result = calla("run", "--no-think", "-n", "1", "hi")
        self.assertEqual("warning: running on the cpu backend, not on " in result.stderr, built != [], result.stderr)
        self.assertEqual(calla("run", "-q", "--no-think", "-n", "1", "hi").stderr, "")

    def test_help_and_unknown_commands(self):
        self.assertIn('no command "foo"', calla("foo").stderr)
        self.assertEqual(calla("help", "run").stdout, calla("run", "--help").stdout)
        self.assertEqual(calla("version").stdout, calla("--version").stdout)
        self.assertIn("calla run --help", calla("run").stderr)

    def test_results_that_cannot_be_written_are_a_failure(self):
        for args in [["run", "-q", "--no-think", "-n", "4", "hi"], ["inspect", TINY], ["tokenize", "x"], ["--help"]]:
            with open("/dev/full", "w", encoding="utf-8") as full:
                result = subprocess.run([CALLA, *args], stdout=full, stderr=subprocess.PIPE, text=True)
            self.assertEqual(result.returncode, 1, args)
            self.assertIn("stdout cannot be written", result.stderr)


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

    def test_the_cache_can_be_left_out(self):
        talk = "What is 3 plus 4?\nDefine happy.\n/stats\n/quit\n"
        with_cache, without = (calla("chat", "--greedy", "--no-think", "-n", "8", *option, stdin=talk)
                               for option in (["--cache-gb", "0.1"], ["--cache-gb", "0"]))
        self.assertEqual(with_cache.stdout, without.stdout)
        self.assertIn("cache: hit", with_cache.stderr)
        self.assertIn("cache: off", without.stderr)
        refused = calla("chat", "--cache-gb", "0.000001", stdin=talk)
        self.assertEqual((refused.returncode, refused.stdout), (2, ""))
        self.assertRegex(refused.stderr, r"take 0\.\d\d\d GB or more; give --cache-gb at least that, or 0 for no cache\n$")

    def test_ctrl_c_stops_the_answer_only(self):
        chat = Terminal("chat", "-b", "reference", "--no-think")
        chat.expect(b"> ")
        chat.type("What is a kangaroo?\n")
        chat.expect(b"A kang")
        chat.type(b"\x03")
        chat.expect(b"(stopped)")
        chat.expect(b"> ")
        chat.type("half a line\x03")
        chat.expect(b"Ctrl-C again")
        chat.expect(b"> ")
        chat.type("/stats\n")
        chat.expect(b"snapshots")
        chat.expect(b"> ")
        chat.type(b"\x03")
        chat.expect(b"Ctrl-C again")
        chat.expect(b"> ")
        chat.type(b"\x03")
        self.assertEqual(chat.wait(), 0)

    def test_what_is_typed_arrives_in_every_locale(self):
        for locale in ["C", "C.UTF-8", "POSIX"]:
            with tempfile.TemporaryDirectory() as folder:
                saved = os.path.join(folder, "talk.json")
                chat = Terminal("chat", "--no-think", "-n", "2", LC_ALL=locale)
                chat.expect(b"> ")
                chat.type("Was hei\u00dft caf\u00e9 \u732b?\n")
                chat.expect(b"tokens/s")
                chat.expect(b"> ")
                chat.type(f"/save {saved}\n")
                chat.expect(b"messages written")
                chat.type("/quit\n")
                self.assertEqual(chat.wait(), 0)
                with open(saved, encoding="utf-8") as file:
                    self.assertEqual(json.load(file)[0]["content"], "Was hei\u00dft caf\u00e9 \u732b?", locale)

    def test_save_keeps_what_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            saved = os.path.join(folder, "talk.json")
            with open(saved, "w", encoding="utf-8") as file:
                file.write("old")
            lines = [f"/save! {saved}", "hi", f"/save {saved}", "/think maybe", "//slash"]
            result = calla("chat", "--no-think", "-n", "2", stdin="\n".join(lines) + "\n")
            self.assertIn("nothing to save", result.stderr)
            self.assertIn("exists", result.stderr)
            self.assertIn('not "maybe"', result.stderr)
            with open(saved, encoding="utf-8") as file:
                self.assertEqual(file.read(), "old")
            result = calla("chat", "--no-think", "-n", "2", stdin=f"//slash\n/save! {saved}\n")
            with open(saved, encoding="utf-8") as file:
                self.assertEqual(json.load(file)[0]["content"], "/slash")

    def test_a_file_gets_answers_without_thinking(self):
        plain = calla("chat", "--greedy", "-q", stdin="What is a kangaroo?\n").stdout
        self.assertTrue(plain.startswith("A kangaroo"), plain)
        shown = calla("chat", "--greedy", "-q", "--show-thinking", stdin="What is a kangaroo?\n").stdout
        self.assertTrue(shown.endswith(plain) and len(shown) > len(plain), shown)


class Tools(unittest.TestCase):
    def test_tokenize(self):
        ids = json.loads(calla("tokenize", "--ids", "<|im_end|>").stdout)
        self.assertEqual(ids, [4089])
        self.assertGreater(len(json.loads(calla("tokenize", "--ids", "--plain", "<|im_end|>").stdout)), 1)
        self.assertEqual(calla("tokenize", "--count", "").stdout.strip(), "0")
        self.assertRegex(calla("tokenize", "\U0001f600").stdout, r"\\x[0-9a-f]{2}")

    def test_inspect(self):
        report = calla("inspect", TINY)
        self.assertEqual(report.returncode, 0)
        self.assertIn("Qwen3_5Moe", report.stdout)
        json.loads(calla("inspect", "--json", "--tensors", TINY).stdout)
        self.assertEqual(calla("inspect", "--verify", TINY).returncode, 0)

    def test_damaged_checkpoints_exit_3(self):
        with model_copy() as copy:
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

    def test_a_damaged_tokenizer_is_found_without_running(self):
        with model_copy() as copy:
            tokenizer = os.path.join(copy, "tokenizer.json")
            with open(tokenizer, "r+b") as file:
                file.truncate(os.path.getsize(tokenizer) // 2)
            said = calla("run", "x", "-m", copy).stderr
            self.assertIn("tokenizer.json: ", said)
            inspect = calla("inspect", copy)
            self.assertEqual((inspect.returncode, inspect.stderr), (3, said))
            self.assertIn("Qwen3_5Moe", inspect.stdout)  # the rest of the report is there all the same
            report = json.loads(calla("inspect", "--json", copy).stdout)
            self.assertIn("tokenizer.json: ", report["warnings"][0])
            selftest = calla("selftest", "-m", copy)
            self.assertEqual((selftest.returncode, selftest.stdout, selftest.stderr), (3, "", said))
            # Of another model.
            with open(os.path.join(TINY, "tokenizer.json"), encoding="utf-8") as file:
                other = json.load(file)
            other["added_tokens"][0]["id"] = 5000
            with open(tokenizer, "w", encoding="utf-8") as file:
                json.dump(other, file)
            self.assertEqual(calla("inspect", copy).returncode, 3)
            # None at all: a checkpoint to measure speed with.
            os.remove(tokenizer)
            inspect = calla("inspect", copy)
            self.assertEqual(inspect.returncode, 0, inspect.stderr)
            self.assertRegex(inspect.stdout, r"warning: .*tokenizer\.json: missing")

    def test_a_link_to_nowhere_is_not_an_absent_file(self):
        for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            with self.subTest(name=name), model_copy() as copy:
                path = os.path.join(copy, name)
                if os.path.exists(path):
                    os.remove(path)
                os.symlink("gone", path)
                for command in (("run", "x", "-n", "1", "-m", copy), ("inspect", copy)):
                    result = calla(*command)
                    self.assertEqual(result.returncode, 3, (command, result.stderr))
                    self.assertIn(name, result.stderr)

    def test_weights_that_are_not_finite_are_an_error(self):
        with model_copy() as copy:
            weights = os.path.join(copy, "model.safetensors")
            with open(weights, "r+b") as file:
                file.seek(tensor_offset(weights, "language_model.lm_head.scales"))
                file.write(b"\xc0\x7f")  # one NaN
            for sampling in [["--greedy"], [], ["--top-k", "0"]]:
                for backend in ["cpu", "reference"]:
                    result = calla("run", "-q", "--no-think", "-n", "3", "-m", copy, "-b", backend, *sampling, "hi")
                    self.assertEqual((result.returncode, result.stdout), (1, ""), (backend, sampling))
                    self.assertIn("not finite", result.stderr)
            self.assertEqual(calla("bench", "-m", copy, "--prompts", "8", "--contexts", "0", "-r", "1").returncode, 3)

    def test_odd_models(self):
        with tempfile.TemporaryDirectory() as folder:
            # Only GDN layers; and a name that ends in a slash.
            out = os.path.join(folder, "gdn") + "/"
            made = calla("make-checkpoint", "--shape", "calla-tiny", "--layers", "3", "--tokenizer-from", TINY, out)
            self.assertEqual(made.returncode, 0, made.stderr)
            self.assertEqual(os.listdir(folder), ["gdn"])
            result = calla("chat", "-q", "-m", out, "-n", "5", stdin="hi\nho\n")
            self.assertEqual(result.returncode, 0, result.stderr)
            # Without a tokenizer, the message says what to do.
            bare = os.path.join(folder, "bare")
            calla("make-checkpoint", "--shape", "calla-tiny", "--layers", "1", bare)
            self.assertIn("--tokenizer-from", calla("run", "x", "-m", bare).stderr)
            # A tokenizer of another model.
            shutil.copy(os.path.join(TINY, "tokenizer.json"), bare)
            with open(os.path.join(bare, "config.json"), encoding="utf-8") as file:
                config = json.load(file)
            config["text_config"]["vocab_size"] = 4000
            with open(os.path.join(bare, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file)
            self.assertEqual(calla("inspect", bare).returncode, 3)

    def test_a_stopped_make_checkpoint_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "made")
            for number in [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]:
                process = subprocess.Popen([CALLA, "make-checkpoint", "-q", out], stderr=subprocess.DEVNULL)
                while process.poll() is None and not os.listdir(folder):
                    time.sleep(0.01)
                process.send_signal(number)
                process.wait(timeout=60)
                if number != signal.SIGKILL:
                    self.assertEqual(process.returncode, 130)
                    self.assertEqual(os.listdir(folder), [])
            self.assertNotEqual(os.listdir(folder), [])  # what the killed one left
            calla("make-checkpoint", "--shape", "calla-tiny", "--layers", "1", out)
            self.assertEqual(os.listdir(folder), ["made"])

    def test_threads_that_cannot_be_started(self):
        script = f'ulimit -v 600000; exec "{CALLA}" run -q --threads 100 --no-think -n 1 hi'
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
        if "Sanitizer" in result.stderr:
            self.skipTest("a sanitizer needs more address space than this leaves")
        self.assertEqual(result.returncode, 4, result.stderr)
        self.assertIn("--threads", result.stderr)

    def test_golden_files_that_fit_nothing(self):
        ids = ("I32", [2], struct.pack("<2i", 5, 6))
        floats = lambda n: ("F32", [n], struct.pack(f"<{n}f", *[0.5] * n))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "golden.safetensors")
            for tensors in [{"a/input_ids": ids}, {"a/input_ids": ids, "a/attn0/k_cache": floats(4)},
                            {"a/input_ids": ids, "a/gdn3/state": floats(4)}, {"a/input_ids": ids, "a/gdn99/state": floats(4)},
                            {"a/prompt_ids": ids, "a/output_ids": ids, "a/margin": ("F32", [2], struct.pack("<2f", -1, 1))}]:
                write_safetensors(path, tensors)
                result = calla("eval", "-q", "--golden", path)
                self.assertEqual(result.returncode, 3, (list(tensors), result.stdout, result.stderr))
            # A long answer is no reason to stop; nothing is said on stderr where it is no terminal.
            long = ("I32", [600], struct.pack("<600i", *[7] * 600))
            write_safetensors(path, {"a/prompt_ids": ids, "a/output_ids": long, "a/margin": floats(600)})
            result = calla("eval", "--golden", path)
            self.assertEqual((result.returncode, result.stderr), (1, ""))

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

    def test_bench_of_two_rounds_takes_the_middle(self):
        report = json.loads(calla("bench", "-b", "cpu", "--prompts", "16,32", "--contexts", "0", "-r", "2",
                                  "--decode-tokens", "4", "--json").stdout)
        for point in report["prefill"] + report["decode"]:
            self.assertAlmostEqual(point["tokens_per_s"], (point["slowest"] + point["fastest"]) / 2)

    def test_bench_leaves_no_empty_files(self):
        with tempfile.TemporaryDirectory() as folder:
            svg, report, kept = (os.path.join(folder, name) for name in ("plot.svg", "bench.json", "kept.json"))
            with open(kept, "w", encoding="utf-8") as file:
                file.write("earlier")
            too_long = ["bench", "--contexts", "1000000", "--svg", svg]
            self.assertEqual(calla(*too_long, "--json-file", report).returncode, 2)
            self.assertEqual(calla(*too_long, "--json-file", kept).returncode, 2)
            with subprocess.Popen([CALLA, "bench", "-b", "reference", "-r", "100", "--svg", svg, "--json-file", report],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                time.sleep(1)
                process.send_signal(signal.SIGINT)
            self.assertEqual(os.listdir(folder), ["kept.json"])
            with open(kept, encoding="utf-8") as file:
                self.assertEqual(file.read(), "earlier")
            # A path that cannot be written is refused before anything else is looked at.
            result = calla(*too_long, "--json-file", os.path.join(folder, "no", "such", "folder.json"))
            self.assertEqual(result.returncode, 1)
            self.assertIn("cannot be written: No such file or directory", result.stderr)

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
        # The longest sequence comes last, so that the next run's warm-up begins behind it.
        longest_last = calla("bench", "-b", "cpu", "--ablate", "all", "--prompts", "16", "--contexts", "0,150", "-r", "2",
                             "--decode-tokens", "2", "--json")
        self.assertEqual(longest_last.returncode, 0, longest_last.stderr)

    def test_bench_of_random_weights_with_a_profile(self):
        # A prompt as long as the warm-up and no context behind it: the warm-up's own steps must have room.
        result = calla("bench", "--synthetic", "calla-tiny", "--layers", "4", "--prompts", "64", "--contexts", "0",
                       "-r", "1", "--decode-tokens", "2", "--profile", "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        report = json.loads(result.stdout)
        self.assertIn("random weights, 4 layers", report["model"])
        decode = report["profiles"][0]["parts"]
        self.assertEqual({p["name"]: p["times"] for p in decode}["mix_gdn"], 3)
        self.assertGreater(sum(p["seconds"] for p in decode), 0)
        self.assertEqual(calla("bench", "--synthetic", "no-such-shape").returncode, 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
