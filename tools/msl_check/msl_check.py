#!/usr/bin/env python3
"""Checks Metal kernels on Linux for what Apple's compiler and runtime would refuse.

    msl_check.py [--clang clang++] [-I DIR]... [--host FILE...] kernel.metal...

Each file is rewritten as C++ for OpenCL, whose front end in clang enforces address spaces and forbids much of what MSL
forbids, and compiled against msl_lint.h. Metal's limits are checked on the text. What is found is printed as
file:line: message; the exit status is 1 if anything was found, 0 if nothing, and 77 if clang cannot compile OpenCL.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SOFTMETAL = os.path.join(HERE, "..", "..", "tests", "softmetal")
sys.path.insert(0, os.path.join(SOFTMETAL, "tools"))

from msl_text import (SKIP, TranslationError, matching, matching_angle, preprocess, previous,  # noqa: E402
                      significant, split_commas, tokenize)
from translate import Translation, const_follows  # noqa: E402

# Words of OpenCL that MSL leaves free.
OPENCL_WORDS = {"local", "global", "generic", "pipe", "read_only", "write_only", "read_write", "uniform", "__read_only"}
SPACES = {"device": "__global", "constant": "__constant", "threadgroup": "__local", "thread": "__private"}
VECTOR = re.compile(r"(bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]$")
FORBIDDEN_WORDS = {
    "double": "there is no double in MSL",
    "goto": "no goto in MSL",
    "virtual": "no virtual functions in MSL",
    "throw": "no exceptions in MSL",
    "try": "no exceptions in MSL",
    "dynamic_cast": "no dynamic_cast in MSL",
    "typeid": "no typeid in MSL",
    "new": "no new in MSL",
    "delete": "no delete in MSL",
    "thread_local": "no thread_local in MSL",
    "noexcept": "no noexcept in MSL",
    "std": "no C++ standard library in MSL",
    "asm": "no inline assembly in MSL",
    "register": "no register in MSL",
    "wchar_t": "no wide characters in MSL",
}
MAX_BUFFER_INDEX = 30
MAX_THREADGROUP_BYTES = 32768
MAX_THREADS = 1024


class Found:
    def __init__(self):
        self.lines = []

    def add(self, token, message):
        self.lines.append(f"{os.path.relpath(token.file)}:{token.line}: {message}")


class Lint(Translation):
    """Rewrites a file as C++ for OpenCL. Finding kernels and threadgroup variables is the translator's work."""

    def __init__(self, tokens, constant_is_opencl):
        super().__init__(tokens)
        self.constant_is_opencl = constant_is_opencl

    def run(self):
        self.program_scope(0, len(self.tokens))
        self.vectors_and_names()
        self.attributes()
        self.spaces()

    def numbers_and_swizzles(self):
        pass

    def variable(self, start, stop):
        super().variable(start, stop)
        first = significant(self.tokens, start)
        for name, _, kind, token in self.constants:
            if token is self.tokens[first]:
                self.replaced[first] = f"__constant {kind} {name} = 0;"
                return
        for name, _ in self.derived:
            if self.replaced.get(first, "").endswith(f" {name}{{}};"):
                self.replaced[first] = "__constant " + self.replaced[first].replace("static ", "").replace("{}", " = {}")

    def threadgroup_variables(self, kernel, begin, end):
        sizes, k = [], begin
        while k < end:
            if self.tokens[k].text != "threadgroup" or not self.is_variable_declaration(k):
                k += 1
                continue
            stop = k
            while self.tokens[stop].text != ";":
                stop = matching(self.tokens, stop) if self.tokens[stop].text in ("(", "{", "[") else stop
                stop += 1
            pieces = split_commas(self.tokens[k + 1:stop])
            first = [t for t in pieces[0] if t.kind not in SKIP]
            cut = next((i for i, t in enumerate(first) if t.text == "["), len(first)) - 1
            element = " ".join(t.text for t in first[:cut])
            element = re.sub(r"\batomic_(\w+)\b", r"metal::lint_atomic<\1>", element)
            lines = []
            for piece in [first[cut:]] + [[t for t in p if t.kind not in SKIP] for p in pieces[1:]]:
                kind = element + "".join(t.text for t in piece[1:])
                lines.append(f"auto& {piece[0].text} = metal::lint_local<{kind}>();")
                sizes.append(f"(sizeof({kind}) + 15) / 16 * 16")
            self.blank(k, stop + 1)
            self.replaced[k] = " ".join(lines)
            last = k
            k = stop + 1
        if sizes:
            self.replaced[last] += (f" static_assert({' + '.join(sizes)} <= {MAX_THREADGROUP_BYTES}, "
                                    f"\"kernel {kernel.name}: more threadgroup memory than a device has\");")

    def explicit_instantiation(self, start, i):
        """The front end needs the instantiation, to look into the template; attributes go later."""
        blanked = dict(self.replaced)
        end = super().explicit_instantiation(start, i)
        self.replaced = blanked
        return end

    def attributes(self):
        i = 0
        while i < len(self.tokens):
            if self.tokens[i].text == "[[":
                close = matching(self.tokens, i)
                self.blank(i, close + 1)
                i = close
            i += 1

    def vectors_and_names(self):
        for i, t in enumerate(self.tokens):
            if i in self.replaced:
                continue
            if t.kind == "number":
                lower = t.text.lower()
                if lower.endswith("bf"):
                    self.replaced[i] = f"bfloat({t.text[:-2]}f)"
                continue
            if t.kind != "word":
                continue
            after = significant(self.tokens, i + 1)
            following = self.tokens[after].text if after < len(self.tokens) else ""
            before = previous(self.tokens, i)
            leading = self.tokens[before].text if before >= 0 else ""
            if VECTOR.match(t.text):
                name = re.sub("^bool", "int", t.text)
                self.replaced[i] = f"metal::construct<{name}>" if following == "(" and leading not in (".", "->") else name
            elif t.text == "vec" and following == "<":
                close = matching_angle(self.tokens, after)
                if self.tokens[significant(self.tokens, close + 1)].text == "(":
                    self.replaced[i] = "metal::construct<metal::vec"
                    self.replaced[close] = ">>"
            elif t.text == "static_cast" and following == "<":
                kind = significant(self.tokens, after + 1)
                if VECTOR.match(self.tokens[kind].text):
                    self.replaced[i] = "metal::construct"
            elif re.match(r"atomic_\w+_explicit$", t.text):
                self.replaced[i] = "lint_" + t.text
            elif re.match(r"atomic_(u?int|float|bool|ulong)$", t.text):
                self.replaced[i] = f"metal::lint_atomic<{t.text[7:]}>"
            elif t.text == "memory_order_relaxed":
                self.replaced[i] = "metal::lint_relaxed"
            elif t.text.startswith("memory_order_") and leading != "atomic_thread_fence":
                pass  # undeclared: an error, as only relaxed exists for atomics
            elif t.text == "is_function_constant_defined":
                self.replaced[i] = "true || "
            elif t.text == "matmul2d" and following == "<":
                comma = after
                while self.tokens[comma].text != ",":
                    comma += 1
                self.blank(after + 1, comma + 1)
                self.replaced[i] = "lint_matmul2d"

    def spaces(self):
        for i, t in enumerate(self.tokens):
            if t.kind != "word" or i in self.replaced:
                continue
            if t.text in SPACES:
                self.replaced[i] = SPACES[t.text]
                if t.text == "constant" and not self.constant_is_opencl:
                    self.replaced[i] = "__global" if const_follows(self.tokens, i) else "const __global"
            elif t.text in OPENCL_WORDS:
                self.replaced[i] = t.text + "_"
            elif t.text == "kernel":
                self.replaced[i] = ""
            elif t.text == "coherent":
                self.replaced[i] = ""
                after = significant(self.tokens, i + 1)
                if self.tokens[after].text == "(":
                    self.blank(after, matching(self.tokens, after) + 1)


def check_words(tokens, found):
    for i, t in enumerate(tokens):
        if t.kind == "word" and t.text in FORBIDDEN_WORDS:
            before = previous(tokens, i)
            if before >= 0 and tokens[before].text in (".", "->", "::"):
                continue
            if t.text == "delete" and before >= 0 and tokens[before].text == "=":
                continue
            found.add(t, FORBIDDEN_WORDS[t.text])
        if t.kind == "number" and re.search(r"[.eE].*[lL]$", t.text) and not t.text.lower().startswith("0x"):
            found.add(t, "no long double in MSL")


def check_pointers(lint, found):
    """Every pointer or reference parameter of a function names its address space."""
    for start, body, close, _ in lint.functions:
        k = significant(lint.tokens, start)
        template_types = set()
        while k < body and lint.tokens[k].text != "(":
            if lint.tokens[k].text == "template":
                end = matching_angle(lint.tokens, significant(lint.tokens, k + 1))
                template_types |= {t.text for t in lint.tokens[k:end] if t.kind == "word"}
                k = end
            elif lint.tokens[k].text in ("[[", "__attribute__"):
                k = matching(lint.tokens, significant(lint.tokens, k + (lint.tokens[k].text == "__attribute__")))
            k += 1
        if k >= body:
            continue
        for piece in split_commas(lint.tokens[k + 1:matching(lint.tokens, k)]):
            words = [t for t in piece if t.kind not in SKIP]
            texts = [t.text for t in words]
            if ("*" in texts or "&" in texts) and not any(s in texts for s in SPACES):
                found.add(words[0], f"parameter \"{' '.join(texts)}\" needs an address space")


def check_recursion(lint, found):
    calls = {}
    for function in lint.functions:
        _, body, close, _ = function
        called = set()
        for i in range(body, close):
            t = lint.tokens[i]
            if t.kind == "word" and lint.tokens[significant(lint.tokens, i + 1)].text == "(" and \
                    lint.tokens[previous(lint.tokens, i)].text not in (".", "->"):
                called.add(t.text)
        calls.setdefault(function_name(lint, function), []).append((lint.tokens[body], called))
    for name, bodies in calls.items():
        if len(bodies) > 1:
            continue  # overloads share a name here; that one calls the other is no recursion
        reached, todo = set(), [name]
        while todo:
            for _, called in calls[todo.pop()]:
                todo += [c for c in called if c in calls and c not in reached]
                reached |= called
        if name in reached:
            found.add(bodies[0][0], f"{name} calls itself")


def function_name(lint, function):
    start, body, _, _ = function
    k = significant(lint.tokens, start)
    while k < body and lint.tokens[k].text != "(":
        if lint.tokens[k].text == "[[":
            k = matching(lint.tokens, k)
        elif lint.tokens[k].text == "template":
            k = matching_angle(lint.tokens, significant(lint.tokens, k + 1))
        k += 1
    return lint.tokens[previous(lint.tokens, k)].text


def check_kernels(lint, found, host_names, constants):
    for kernel in lint.kernels.values():
        taken = {}
        for p in kernel.parameters:
            if p.kind == "buffer":
                index = int(p.index, 0) if re.match(r"\d", p.index) else None
                if index is not None and index > MAX_BUFFER_INDEX:
                    found.add(p.token, f"kernel {kernel.name}: buffer index {index} is above {MAX_BUFFER_INDEX}")
                if index in taken and index is not None and not (p.guard and taken[index].guard):
                    found.add(p.token, f"kernel {kernel.name}: buffer index {index} is used twice")
                taken[index] = p
            if p.builtin and not re.match(r"(const )?(uint|ushort)[23]?$", p.type):
                found.add(p.token, f"kernel {kernel.name}: [[{p.builtin}]] cannot be a {p.type}")
            if p.kind == "buffer" and re.search(r"\b(size_t|ptrdiff_t|bool)\b", p.type):
                found.add(p.token, f"kernel {kernel.name}: parameter {p.name} of type {p.type}")
        groups = [p for p in kernel.parameters if p.builtin in ("thread_position_in_grid", "threads_per_grid",
                                                                "threadgroup_position_in_grid",
                                                                "threadgroups_per_grid",
                                                                "thread_position_in_threadgroup",
                                                                "threads_per_threadgroup")]
        if len({p.type[-1] if p.type[-1] in "23" else "1" for p in groups}) > 1:
            found.add(kernel.token, f"kernel {kernel.name}: position inputs must have one vector size")
        if kernel.max_total_threads.isdigit() and int(kernel.max_total_threads) > MAX_THREADS:
            found.add(kernel.token, f"kernel {kernel.name}: more than {MAX_THREADS} threads")
        if kernel.name == "main":
            found.add(kernel.token, "no kernel may be called main")
    for instance in lint.instances:
        if instance.host_name in host_names:
            found.add(instance.kernel.token, f"host name {instance.host_name} is also in {host_names[instance.host_name]}")
        host_names[instance.host_name] = os.path.relpath(instance.kernel.token.file)
    for name, index, _, token in lint.constants:
        other = constants.setdefault(index, (name, token))
        if other[0] != name and other[1].file == token.file:
            found.add(token, f"function constant {name} has the index {index} of {other[0]}")


def host_strings(paths):
    """String literals of the host's files: those in a first argument of kernel(...), with their places, and all."""
    asked, everything = [], set()
    for path in paths:
        with open(path, encoding="utf-8") as f:
            tokens = [t for t in tokenize(f.read(), path) if t.kind not in SKIP]
        everything |= {t.text.strip('"') for t in tokens if t.kind == "string"}
        for i, t in enumerate(tokens):
            if t.text != "kernel" or i + 1 == len(tokens) or tokens[i + 1].text != "(":
                continue
            arguments = split_commas(tokens[i + 2:matching(tokens, i + 1)])
            for k, argument in enumerate(arguments[0] if arguments else []):
                if argument.kind == "string" and (k == 0 or arguments[0][k - 1].text != "+"):
                    joined = k + 1 < len(arguments[0]) and arguments[0][k + 1].text == "+"
                    asked.append((argument.text.strip('"'), joined, argument))
    return asked, everything


def compile_opencl(clang, text):
    with tempfile.NamedTemporaryFile("w", suffix=".clcpp", delete=False) as f:
        f.write(text)
    try:
        result = subprocess.run(
            [clang, "-x", "cl", "-cl-std=clc++2021", "--target=spir64", "-fsyntax-only", "-cl-single-precision-constant", "-cl-no-stdinc",
             "-ferror-limit=0", "-Werror=undefined-inline", "-Wno-undefined-internal", "-Wno-unused-value",
             "-fno-caret-diagnostics", "-include", os.path.join(HERE, "msl_lint.h"), f.name],
            capture_output=True, text=True)
        return result.returncode, result.stderr.replace(f.name, "rewritten text")
    finally:
        os.unlink(f.name)


def diagnostics(output, wanted):
    """The errors for which wanted(message and notes) holds, each with the instantiation that led to it."""
    kept, lines = [], output.splitlines()
    for n, line in enumerate(lines):
        match = re.match(r"(.*?):(\d+):(\d+): (?:fatal error|error): (.*)", line)
        if not match:
            continue
        notes = []
        for following in lines[n + 1:]:
            if re.match(r".*?:\d+:\d+: (error|warning|fatal error): ", following):
                break
            notes.append(following)
        if not wanted(match.group(4) + " ".join(notes)):
            continue
        path, line_number = match.group(1), match.group(2)
        if path.endswith("msl_lint.h"):  # the call is where the reader must look
            for note in notes:
                call = re.match(r"(.*?):(\d+):\d+: note: in instantiation of", note)
                if call and not call.group(1).endswith("msl_lint.h"):
                    path, line_number = call.group(1), call.group(2)
                    break
        kept.append(f"{os.path.relpath(path) if os.path.exists(path) else path}:{line_number}: {match.group(4)}")
    return kept


# bfloat vectors are a class here, a built-in type in MSL: ?: takes a reference and a value of those.
ONLY_HERE = re.compile(r"incompatible operand types \('(const )?__\w+ bvec<.*bvec<")


def compile_both_ways(path, tokens_of, clang, keep):
    """Once with constant as read-only device memory, as MSL copies plain structs out of it and C++ for OpenCL cannot;
    and once with its own address space, of which only the pointers' errors count."""
    kept = []
    for own_space in (False, True):
        lint = Lint(tokens_of(), own_space)
        lint.run()
        rewritten = lint.render(0, len(lint.tokens))
        if keep:
            name = os.path.basename(path) + (".constant" if own_space else "") + ".clcpp"
            with open(os.path.join(keep, name), "w", encoding="utf-8") as f:
                f.write(rewritten)
        _, output = compile_opencl(clang, rewritten)
        if own_space:
            kept += diagnostics(output, lambda m: "__constant" in m and "address space" in m)
        else:
            kept += diagnostics(output, lambda m: not ONLY_HERE.search(m))
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--clang", default="clang++")
    parser.add_argument("--compiler", default="", help="preprocessor; default: the clang")
    parser.add_argument("-I", action="append", default=[], dest="include_dirs")
    parser.add_argument("-D", action="append", default=[], dest="defines")
    parser.add_argument("--host", action="append", default=[], help="C++ file that names kernels")
    parser.add_argument("--keep", help="folder for the rewritten texts")
    options = parser.parse_args()

    try:
        status, _ = compile_opencl(options.clang, "")
    except FileNotFoundError:
        status = 1
    if status != 0:
        print(f"msl_check: skipped: {options.clang} does not compile C++ for OpenCL (clang 12 or later is needed)")
        return 77

    found, host_names, constants = Found(), {}, {}
    for path in options.kernels:
        text = preprocess(options.compiler or options.clang, path, [os.path.join(SOFTMETAL, "msl"), *options.include_dirs],
                          options.defines)
        try:
            lint = Lint(tokenize(text, path), False)
            lint.run()
            found.lines += compile_both_ways(path, lambda: tokenize(text, path), options.clang, options.keep)
        except TranslationError as error:
            found.lines.append(str(error))
            continue
        check_words(lint.tokens, found)
        check_pointers(lint, found)
        check_recursion(lint, found)
        check_kernels(lint, found, host_names, constants)

    asked, strings = host_strings(options.host)
    for name, prefix, token in asked:
        if not any(known.startswith(name) if prefix else known == name for known in host_names):
            found.add(token, f"no kernel is called {name}{'...' if prefix else ''}")
    if options.host:
        prefixes = tuple(s for s in strings if len(s) >= 8)
        for known, file in host_names.items():
            if known not in strings and not known.startswith(prefixes):
                found.lines.append(f"{file}: the host never asks for kernel {known}")

    for line in dict.fromkeys(found.lines):
        print(line)
    print(f"msl_check: {len(options.kernels)} files, {len(host_names)} kernels, {len(set(found.lines))} findings")
    return 1 if found.lines else 0


if __name__ == "__main__":
    sys.exit(main())
