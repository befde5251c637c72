#!/usr/bin/env python3
"""Compares softmetal's <Metal/Metal.hpp> and <Foundation/Foundation.hpp> with Apple's metal-cpp.

    metal_cpp_check.py [--headers DIR] [--host FILE...]

Every class, method (parameter types and constness) and enumerator (value) that softmetal declares must be in Apple's
headers, so that host code which builds on Linux does not meet a misspelt name on a Mac. Without --headers the headers
are taken from PyPI's macOS wheel of mlx-metal, into a temporary folder. Exit status: 0 equal, 1 not, 77 no headers.
"""
import argparse
import glob
import os
import re
import subprocess
import sys
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.join(HERE, "..", "..", "tests", "softmetal", "include")
# What only softmetal has: its constructors of errors and arrays, and the type that stands for a block.
OWN = {("Error", "make"), ("Array", "add"), ("AutoreleasePool", "add")}
# Apple's Referencing has these; softmetal's objects have them from their base.
OWN |= {("Object", m) for m in ("retain", "release", "autorelease", "retainCount")}
# Linux has no blocks; a callable takes the place of `void (^)(void*, NS::UInteger)`.
BLOCK = "constDeallocator&"


def fetch(folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--platform",
               "macosx_14_0_arm64", "--only-binary=:all:", "--no-deps", "--dest", folder, "mlx-metal"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"metal_cpp_check: skipped: the wheel with Apple's headers is out of reach ({type(error).__name__})")
        return None
    for wheel in glob.glob(os.path.join(folder, "*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if "/metal_cpp/" in n and n.endswith(".hpp")]
            archive.extractall(folder, names)
    found = glob.glob(os.path.join(folder, "**", "Metal", "Metal.hpp"), recursive=True)
    if not found:
        print("metal_cpp_check: skipped: the wheel carries no metal-cpp headers")
        return None
    return os.path.dirname(os.path.dirname(found[0]))


def text_of(folder, pattern):
    text = ""
    for path in sorted(glob.glob(os.path.join(folder, pattern))):
        with open(path, encoding="utf-8", errors="replace") as f:
            text += f.read() + "\n"
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r"^\s*#[^\n]*(\\\n[^\n]*)*", "", text, flags=re.M)


def body_at(text, opening):
    depth, i = 0, opening
    while i < len(text):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1:i]
        i += 1
    return text[opening + 1:]


def normal_type(parameter):
    parameter = re.sub(r"=.*", "", parameter)
    parameter = re.sub(r"\b(MTL|NS|std|class|struct)\b(::)?", "", parameter)
    if "(^" in parameter:
        return BLOCK
    parameter = re.sub(r"\s*\[\s*\]", "*", parameter)  # an array parameter is a pointer
    words = re.findall(r"\w+|[*&<>,()]", parameter)
    if "*" in words[-1:] and re.search(r"\w+\*$", parameter.replace(" ", "")):
        # `T* name[]` became `T* name*`: the name is the last word
        k = max(i for i, w in enumerate(words) if re.match(r"\w", w))
        if k > 0 and words[k - 1] in ("*", "&", "const"):
            words.pop(k)
    elif len(words) > 1 and re.match(r"[A-Za-z_]", words[-1]) and words[-1] != "const":
        words.pop()
    return "".join(words)


def split_parameters(text):
    pieces, depth, current = [], 0, ""
    for c in text:
        depth += (c in "(<") - (c in ")>")
        if c == "," and depth == 0:
            pieces.append(current)
            current = ""
        else:
            current += c
    return [p for p in pieces + [current] if p.strip() and p.strip() != "void"]


def classes_of(text):
    """class name -> {(method, (parameter types), const)} and class name -> bases"""
    methods, bases = {}, {}
    for match in re.finditer(r"\bclass\s+(?:_\w+\s+)?(\w+)\s*(?::\s*public\s+([^{;]+))?\{", text):
        name, base = match.group(1), match.group(2) or ""
        body = body_at(text, match.end() - 1)
        found = methods.setdefault(name, set())
        bases.setdefault(name, set()).update(re.findall(r"\w+", re.sub(r"\b(NS|MTL|Referencing|Copying|SecureCoding|" + name + r")\b", "", base)))
        flat, depth = "", 0  # drop nested bodies
        for c in body:
            depth += c == "{"
            if depth == 0:
                flat += c
            elif c == "}" and depth == 1:
                flat += ";"
            depth -= c == "}"
        flat = re.sub(r"\b(private|protected)\s*:.*?(?=\bpublic\s*:|$)", ";", flat, flags=re.S)
        flat = re.sub(r"\bpublic\s*:", ";", flat)
        flat = re.sub(r"template\s*<[^;{]*?>\s*(?=\w)", "", flat)
        for declaration in flat.split(";"):
            m = re.match(r"\s*(.*?)([~\w]+|operator\W+)\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\s*(const)?\s*(?::.*)?$",
                         declaration, re.S)
            if "friend" in declaration or re.search(r"\)\s*(noexcept\s*)?:", declaration):
                continue
            if not m or not m.group(1).strip() or m.group(2) == name:
                continue
            found.add((m.group(2), tuple(normal_type(p) for p in split_parameters(m.group(3))), bool(m.group(4))))
    return methods, bases


def enumerators_of(text):
    values = {}
    for match in re.finditer(r"(?:_(?:MTL|NS)_(?:ENUM|OPTIONS)\s*\([^,]*,\s*(\w+)\s*\)|\benum\s+(?:class\s+)?(\w+)\s*(?::[^{;]*)?)\s*\{", text):
        following = 0
        for entry in body_at(text, match.end() - 1).split(","):
            m = re.match(r"\s*(\w+)\s*(?:=\s*(.+?))?\s*$", entry, re.S)
            if not m:
                continue
            if m.group(2):
                expression = re.sub(r"\b(\d+)[uUlL]+\b", r"\1", m.group(2).strip())
                try:
                    following = eval(expression, {"__builtins__": {}}, dict(values))  # numbers, shifts, earlier names
                except Exception:
                    continue
            values[m.group(1)] = following
            following += 1
    return values


def all_methods(name, methods, bases):
    found = set(methods.get(name, set()))
    for base in bases.get(name, set()):
        found |= all_methods(base, methods, bases)
    return found


def compare(label, ours, theirs):
    problems = []
    our_methods, _ = classes_of(ours)
    their_methods, their_bases = classes_of(theirs)
    count = 0
    for name, methods in sorted(our_methods.items()):
        if name not in their_methods:
            problems.append(f"{label}: Apple has no class {name}")
            continue
        available = all_methods(name, their_methods, their_bases)
        for method, parameters, const in sorted(methods):
            if (name, method) in OWN or method.startswith("~") or method.startswith("operator"):
                continue
            count += 1
            if (method, parameters, const) in available:
                continue
            same = [m for m in available if m[0] == method]
            if not same:
                problems.append(f"{label}::{name}::{method}: Apple has no such method")
            else:
                shapes = "; ".join(f"({', '.join(p)}){' const' if c else ''}" for _, p, c in sorted(same))
                problems.append(f"{label}::{name}::{method}({', '.join(parameters)}){' const' if const else ''}: "
                                f"Apple has {shapes}")
    our_values, their_values = enumerators_of(ours), enumerators_of(theirs)
    for name, value in our_values.items():
        if name not in their_values:
            problems.append(f"{label}: Apple has no enumerator {name}")
        elif their_values[name] != value:
            problems.append(f"{label}: {name} is {value} here and {their_values[name]} in Apple's headers")
    return problems, count, len(our_values)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--headers", help="folder that holds Metal/ and Foundation/ of metal-cpp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        headers = options.headers or fetch(folder)
        if not headers:
            return 77
        problems, methods, values = [], 0, 0
        for label, part in (("NS", "Foundation"), ("MTL", "Metal")):
            found, m, v = compare(label, text_of(OURS, f"{part}/*.hpp"), text_of(headers, f"{part}/*.hpp"))
            problems, methods, values = problems + found, methods + m, values + v
    for problem in problems:
        print(problem)
    print(f"metal_cpp_check: {methods} methods and {values} enumerators compared, {len(problems)} differ")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
