#!/usr/bin/env python3
"""Turns one .metal file into C++20 that runs on softmetal.

    translate.py --compiler g++ --library NAME -I DIR... -D MACRO... --depfile F.d --output F.cc kernel.metal

The file is preprocessed with MSL's macros, then its tokens are rewritten (docs/softmetal.md has the list): address
space words go, `constant` becomes `const`, threadgroup variables of kernels become per-threadgroup storage, function
constants become variables, and a table of the kernels, their arguments and the function constants is appended.
"""
import argparse
import re
import sys

from msl_table import CONSTANT_TYPES, table
from msl_text import (SKIP, TranslationError, attributes_in, join, matching, matching_angle, number, preprocess,
                      previous, significant, split_commas, tokenize)

ERASED_WORDS = {"device", "thread", "threadgroup", "kernel", "coherent", "threadgroup_imageblock"}
KEPT_ATTRIBUTES = {"maybe_unused", "nodiscard", "fallthrough", "likely", "unlikely", "gnu::noinline",
                   "clang::always_inline"}
BUILTIN_INPUTS = {
    "thread_position_in_grid", "threads_per_grid", "thread_position_in_threadgroup", "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup", "threadgroup_position_in_grid", "threadgroups_per_grid",
    "thread_index_in_threadgroup", "thread_index_in_simdgroup", "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup", "threads_per_simdgroup", "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup", "grid_origin", "grid_size", "thread_execution_width",
}
SWIZZLE = re.compile(r"[xyzw]{2,4}$")
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/="}


class Parameter:
    def __init__(self):
        self.name = self.type = self.kind = ""
        self.index = None
        self.reference = self.writable = self.constant = False
        self.guard = None
        self.builtin = None
        self.token = None


class Kernel:
    def __init__(self, name, token):
        self.name, self.token = name, token
        self.parameters = []
        self.template_parameters = None  # names, if it is a template
        self.max_total_threads = "0"
        self.required_threads = []
        self.host_name = None
        self.words = set()


class Instance:
    def __init__(self, kernel, expression, host_name):
        self.kernel, self.expression, self.host_name = kernel, expression, host_name


class Translation:
    def __init__(self, tokens):
        self.tokens = tokens
        self.kernels = {}
        self.instances = []
        self.constants = []          # (name, index, type, token)
        self.derived = []            # (name, initialiser text)
        self.replaced = {}           # token index -> text (others keep theirs)
        self.functions = []          # definitions that are no kernels, for overloads on address spaces

    # --- helpers ------------------------------------------------------------------------------------------------
    def text(self, i):
        return self.replaced.get(i, self.tokens[i].text)

    def render(self, begin, end):
        return "".join(self.text(i) for i in range(begin, end))

    def blank(self, begin, end):
        for i in range(begin, end):
            if self.tokens[i].kind not in ("newline", "directive"):
                self.replaced[i] = ""

    # --- the passes ---------------------------------------------------------------------------------------------
    def run(self):
        self.numbers_and_swizzles()
        self.program_scope(0, len(self.tokens))
        self.attributes()
        self.address_spaces()
        self.overloads()

    def numbers_and_swizzles(self):
        for i, t in enumerate(self.tokens):
            if t.kind == "number":
                self.replaced[i] = number(t)
            elif t.kind == "word" and SWIZZLE.match(t.text):
                before = previous(self.tokens, i)
                if before < 0 or self.tokens[before].text not in (".", "->"):
                    continue
                after = significant(self.tokens, i + 1)
                if after < len(self.tokens) and self.tokens[after].text == "(":
                    continue
                places = ", ".join(str("xyzw".index(c)) for c in t.text)
                assigned = after < len(self.tokens) and self.tokens[after].text in ASSIGNMENTS
                self.replaced[i] = f"template swizzle{'_ref' if assigned else ''}<{places}>()"

    def program_scope(self, begin, end):
        """Finds kernels, instantiations and constants among the declarations in [begin, end)."""
        i = begin
        start = begin  # of the current declaration
        template_names = None
        while i < end:
            t = self.tokens[i]
            if t.kind in SKIP:
                i += 1
                continue
            if t.text == "namespace" or t.text == "extern":
                while self.tokens[i].text not in ("{", ";"):
                    i += 1
                if self.tokens[i].text == "{":
                    close = matching(self.tokens, i)
                    self.program_scope(i + 1, close)
                    i = close
                i += 1
                start, template_names = i, None
                continue
            if t.text == "template":
                after = significant(self.tokens, i + 1)
                if self.tokens[after].text == "<":
                    close = matching_angle(self.tokens, after)
                    names = template_parameter_names(self.tokens[after + 1:close])
                    template_names = (template_names or []) + names
                    i = close + 1
                    continue
                i = self.explicit_instantiation(start, i)
                start, template_names = i, None
                continue
            if t.text == "[[":
                i = matching(self.tokens, i) + 1
                continue
            if t.text == "(":
                i = matching(self.tokens, i) + 1
                continue
            if t.text == ";":
                self.variable(start, i)
                i += 1
                start, template_names = i, None
                continue
            if t.text == "{":
                body, close = i, matching(self.tokens, i)
                declaration = [k for k in range(start, i) if self.tokens[k].kind not in SKIP]
                words = [self.tokens[k].text for k in declaration]
                if self.is_kernel(start, i):
                    self.kernel(start, i, close, template_names)
                    i = close + 1
                    start, template_names = i, None
                    continue
                i = close + 1
                if words and words[0] not in ("struct", "class", "union", "enum", "using", "typedef", "constant",
                                              "constexpr", "const", "static", "template") or ")" in words:
                    self.note_helper(close, start)
                    self.functions.append((start, body, close, begin))
                    start, template_names = i, None
                elif "=" in words or words and words[0] in ("struct", "class", "union", "enum", "typedef"):
                    pass  # runs on to ';'
                else:
                    after = significant(self.tokens, i)
                    if after >= end or self.tokens[after].text != ";":
                        start, template_names = i, None
                continue
            i += 1

    def note_helper(self, close, start):
        """Threadgroup variables may only be declared in kernels."""
        for k in range(start, close):
            if self.tokens[k].text == "threadgroup" and self.is_variable_declaration(k):
                raise TranslationError(self.tokens[k], "threadgroup variables must be declared in a kernel function")

    def is_kernel(self, start, end):
        depth = 0
        k = start
        while k < end:
            text = self.tokens[k].text
            if text == "kernel" and depth == 0:
                return True
            if text == "[[":
                close = matching(self.tokens, k)
                if any(name == "kernel" for name, _ in attributes_in(self.tokens[k:close + 1])):
                    return True
                k = close
            elif text == "(":
                k = matching(self.tokens, k)
            k += 1
        return False

    def kernel(self, start, body, close, template_names):
        k = start
        attributes = []
        name = None
        while k < body:
            t = self.tokens[k]
            if t.text == "[[":
                end = matching(self.tokens, k)
                attributes += attributes_in(self.tokens[k:end + 1])
                k = end + 1
                continue
            if t.text == "template":
                k = matching_angle(self.tokens, significant(self.tokens, k + 1)) + 1
                continue
            if t.text == "(":
                name = previous(self.tokens, k)
                break
            k += 1
        if name is None:
            raise TranslationError(self.tokens[body], "a kernel needs a parameter list")
        open_paren, close_paren = k, matching(self.tokens, k)
        kernel = Kernel(self.tokens[name].text, self.tokens[name])
        if kernel.name in self.kernels:
            raise TranslationError(kernel.token, f"kernel {kernel.name}: kernels cannot be overloaded")
        kernel.template_parameters = template_names
        for attribute, argument in attributes:
            if attribute == "max_total_threads_per_threadgroup":
                kernel.max_total_threads = argument
            elif attribute == "required_threads_per_threadgroup":
                kernel.required_threads = argument.split(",")
            elif attribute == "host_name":
                kernel.host_name = argument.strip('"')
        for piece in split_commas(self.tokens[open_paren + 1:close_paren]):
            kernel.parameters.append(self.parameter(kernel, piece))
        assign_indices(kernel)
        self.kernels[kernel.name] = kernel
        kernel.words = {t.text for t in self.tokens[start:close] if t.kind == "word"}
        self.threadgroup_variables(kernel, body + 1, close)
        if template_names is None:
            self.instances.append(Instance(kernel, kernel.name, kernel.host_name or kernel.name))

    def parameter(self, kernel, piece):
        p = Parameter()
        words, attributes = [], []
        k = 0
        while k < len(piece):
            if piece[k].text == "[[":
                end = matching(piece, k)
                attributes += attributes_in(piece[k:end + 1])
                k = end + 1
                continue
            if piece[k].kind not in SKIP:
                words.append(piece[k])
            k += 1
        p.token = words[0]
        texts = [w.text for w in words]
        p.name = words[-1].text
        p.type = " ".join(texts[:-1])
        pointer = "*" in texts or "&" in texts
        p.reference = "&" in texts
        space = next((s for s in ("device", "constant", "threadgroup") if s in texts), None)
        if pointer and not space:
            raise TranslationError(words[0], f"kernel {kernel.name}: parameter {p.name} needs an address space")
        if pointer:
            p.kind = "threadgroup" if space == "threadgroup" else "buffer"
            p.constant = space == "constant"
            last = max(i for i, s in enumerate(texts) if s in ("*", "&"))
            p.writable = space == "device" and "const" not in texts[:last]
        for attribute, argument in attributes:
            if attribute in ("buffer", "threadgroup"):
                if attribute != p.kind:
                    raise TranslationError(words[0], f"kernel {kernel.name}: [[{attribute}]] on parameter {p.name}, "
                                                     f"which is no {attribute} pointer")
                p.index = argument
            elif attribute == "function_constant":
                p.guard = argument
            elif attribute in BUILTIN_INPUTS:
                p.builtin = attribute
            elif attribute not in KEPT_ATTRIBUTES:
                raise TranslationError(words[0], f"kernel {kernel.name}: attribute [[{attribute}]] is not supported")
        if not pointer and not p.builtin:
            raise TranslationError(words[0], f"kernel {kernel.name}: parameter {p.name} is neither a buffer nor a "
                                             "built-in input")
        return p

    def is_variable_declaration(self, k):
        """Is the `threadgroup` at k the start of a variable (not a pointer or reference to threadgroup memory)?"""
        before = previous(self.tokens, k)
        if before >= 0 and self.tokens[before].text in ("static", "const", "volatile"):
            before = previous(self.tokens, before)
        if before >= 0 and self.tokens[before].text not in ("{", "}", ";", ")", "]"):
            return False
        i = k + 1
        while self.tokens[i].text not in (";", "{", "}", "="):
            if self.tokens[i].text in ("*", "&"):
                # a product in an array bound is in brackets, which are skipped below
                return False
            if self.tokens[i].text in ("(", "[", "[["):
                i = matching(self.tokens, i)
            elif self.tokens[i].text == "<":
                i = matching_angle(self.tokens, i)
            i += 1
        if self.tokens[i].text == "=":
            raise TranslationError(self.tokens[k], "threadgroup variables cannot have an initialiser")
        return True

    def threadgroup_variables(self, kernel, begin, end):
        instance = kernel.name
        if kernel.template_parameters:
            instance += "<" + ", ".join(kernel.template_parameters) + ">"
        count = 0
        k = begin
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
            # the alignment of the element type is all that MSL gives; an alignas stays with the type
            element = render_type(first[:cut])
            lines = []
            for piece in [first[cut:]] + [[t for t in p if t.kind not in SKIP] for p in pieces[1:]]:
                name, dims = piece[0].text, rewritten(piece[1:])
                lines.append(f"[[maybe_unused]] auto& {name} = ::softmetal::threadgroup_variable<{element} {dims}, &{instance}, {count}>();")
                count += 1
            self.blank(k, stop + 1)
            self.replaced[k] = " ".join(lines)
            k = stop + 1

    def explicit_instantiation(self, start, i):
        """template [[host_name("x")]] [[kernel]] decltype(f<A>) f<A>;  or the full signature. Returns the index after."""
        stop = i
        while self.tokens[stop].text != ";":
            stop = matching(self.tokens, stop) if self.tokens[stop].text in ("(", "{", "[", "[[") else stop
            stop += 1
        host_name, name, k = None, None, i + 1
        while k < stop:
            t = self.tokens[k]
            if t.text == "[[":
                close = matching(self.tokens, k)
                for attribute, argument in attributes_in(self.tokens[k:close + 1]):
                    if attribute == "host_name":
                        host_name = argument.strip('"')
                k = close + 1
                continue
            if t.text == "decltype":
                k = matching(self.tokens, significant(self.tokens, k + 1)) + 1
                continue
            if t.kind == "word" and t.text in self.kernels:
                name = k
                break
            k += 1
        if name is not None:
            kernel = self.kernels[self.tokens[name].text]
            angle = significant(self.tokens, name + 1)
            close = matching_angle(self.tokens, angle)
            arguments = rewritten([t for t in self.tokens[angle:close + 1] if t.kind not in SKIP])
            if not host_name:
                raise TranslationError(self.tokens[i], f"instance of {kernel.name} needs [[host_name(...)]]")
            self.instances.append(Instance(kernel, kernel.name + arguments, host_name))
            self.blank(start, stop + 1)
        return stop + 1

    def variable(self, start, stop):
        """A declaration that ends at `stop`: function constants and program-scope variables derived from them."""
        words = [k for k in range(start, stop) if self.tokens[k].kind not in SKIP]
        texts = [self.tokens[k].text for k in words]
        if "constant" not in texts or not words or texts[0] in ("using", "typedef", "template"):
            return
        attribute = next((k for k in words if self.tokens[k].text == "[["), None)
        if attribute is not None:
            close = matching(self.tokens, attribute)
            found = dict(attributes_in(self.tokens[attribute:close + 1]))
            if "function_constant" in found:
                name = self.tokens[previous(self.tokens, attribute)].text
                kind = [t for t in texts[:texts.index("[[")][:-1] if t not in ("constant", "const", "static")]
                if len(kind) != 1 or kind[0] not in CONSTANT_TYPES:
                    raise TranslationError(self.tokens[start], f"function constant {name}: type {' '.join(kind)}")
                self.constants.append((name, found["function_constant"], kind[0], self.tokens[words[0]]))
                self.blank(start, stop + 1)
                self.replaced[words[0]] = f"static {kind[0]} {name}{{}}; static bool {name}_is_defined = false;"
                return
        names = {c[0] for c in self.constants} | {d[0] for d in self.derived}
        if "=" in texts and "constexpr" not in texts and names & set(texts[texts.index("="):]):
            equals = words[texts.index("=")]
            name_at = previous(self.tokens, equals)
            name = self.tokens[name_at].text
            kind = render_type([self.tokens[k] for k in words
                                if k < name_at and self.tokens[k].text not in ("constant", "const", "static")])
            value = rewritten([t for t in self.tokens[equals + 1:stop]])
            self.derived.append((name, value))
            self.blank(start, stop + 1)
            self.replaced[words[0]] = f"static {kind} {name}{{}};"

    def attributes(self):
        i = 0
        while i < len(self.tokens):
            if self.tokens[i].text == "[[" and self.tokens[i].kind == "punct":
                close = matching(self.tokens, i)
                if not all(name in KEPT_ATTRIBUTES for name, _ in attributes_in(self.tokens[i:close + 1])):
                    self.blank(i, close + 1)
                i = close + 1
            else:
                i += 1

    def address_spaces(self):
        for i, t in enumerate(self.tokens):
            if t.kind != "word" or i in self.replaced:
                continue
            if t.text in ERASED_WORDS:
                self.replaced[i] = ""
                after = significant(self.tokens, i + 1)
                if t.text == "coherent" and self.tokens[after].text == "(":
                    self.blank(after, matching(self.tokens, after) + 1)
            elif t.text == "constant":
                self.replaced[i] = "" if const_follows(self.tokens, i) else "const"
            elif t.text == "is_function_constant_defined":
                opener = significant(self.tokens, i + 1)
                name = significant(self.tokens, opener + 1)
                self.replaced[i] = ""
                self.replaced[name] = self.tokens[name].text + "_is_defined"

    def overloads(self):
        """Functions that differ in address spaces only would be one in C++. Each gets a name of its own, and one under
        the old name picks by where the pointers point."""
        groups = {}
        for start, body, close, scope in self.functions:
            function = Function(self, start, body, close)
            if function.spaces:
                groups.setdefault((scope, function.name, function.signature), []).append(function)
        for same in groups.values():
            if len(same) < 2:
                continue
            for f in same:
                self.replaced[f.name_at] = f.name + "_in_" + "_".join(s or "value" for s in f.spaces)
            first, last = same[0], same[-1]
            names = [f"p{k}" for k in range(len(first.spaces))]
            declared = [f"{t} {n}" for t, n in zip(first.types, names)]
            head = f"{first.head} {first.name}("
            with_defaults = ", ".join(p + d for p, d in zip(declared, first.defaults))
            calls = []
            for f in same:
                tests = " && ".join(f"::softmetal::points_to_{s}({'&' if '&' in t else ''}{n})"
                                    for s, t, n in zip(f.spaces, f.types, names) if s)
                calls.append(f"if ({tests}) return {self.replaced[f.name_at]}({', '.join(names)});")
            calls.append(f"return {self.replaced[first.name_at]}({', '.join(names)});")
            begin = first.start
            self.replaced[begin] = f"{head}{with_defaults}); " + self.text(begin)
            self.replaced[last.close] = (self.text(last.close) + f" {head}{', '.join(declared)}) "
                                         f"{{ {' '.join(calls)} }}")

    def required_constants(self, kernel):
        """Those that the kernel's own text names; one that is_function_constant_defined asks about may be missing."""
        asked = set()
        for i, t in enumerate(self.tokens):
            if t.text == "is_function_constant_defined":
                asked.add(self.tokens[significant(self.tokens, significant(self.tokens, i + 1) + 1)].text)
        return [c[0] for c in self.constants if c[0] in kernel.words and c[0] not in asked]


class Function:
    """A function definition, as far as overloading on address spaces needs it."""

    def __init__(self, translation, start, body, close):
        tokens = translation.tokens
        self.close, self.spaces, self.types, self.defaults, self.name = close, [], [], [], ""
        self.start = significant(tokens, start)
        k = self.start
        while k < body and tokens[k].text != "(":
            if tokens[k].text == "[[":
                k = matching(tokens, k)
            elif tokens[k].text == "template":
                k = matching_angle(tokens, significant(tokens, k + 1))
            elif tokens[k].text == "__attribute__":
                k = matching(tokens, significant(tokens, k + 1))
            k += 1
        self.name_at = previous(tokens, k)
        if k >= body or tokens[self.name_at].kind != "word":
            self.spaces = []
            return
        self.name = tokens[self.name_at].text
        self.head = translation.render(self.start, self.name_at)
        signature = []
        for piece in split_commas(tokens[k + 1:matching(tokens, k)]):
            words, default = [t for t in piece if t.kind not in SKIP], ""
            for n, t in enumerate(words):
                if t.text == "=":
                    default = " " + rewritten(words[n:])
                    words = words[:n]
                    break
            self.defaults.append(default)
            if len(words) > 1 and words[-1].kind == "word" and words[-2].text not in ("::", "device", "constant"):
                words = words[:-1]  # the parameter's name
            texts = [t.text for t in words]
            pointer = "*" in texts or "&" in texts
            self.spaces.append(next((w for w in texts if w in ("device", "constant", "threadgroup", "thread")), "")
                               if pointer else "")
            self.types.append(rewritten(words))
            signature.append(" ".join(sorted(rewritten(words).replace("*", " * ").replace("&", " & ").split())))
        self.signature = ", ".join(signature)
        if not any(self.spaces):
            self.spaces = []


def const_follows(tokens, i):
    """`const constant T`, `constant const T`, `constant constexpr T`: C++ wants const once."""
    before = previous(tokens, i)
    if before >= 0 and tokens[before].text in ("const", "constexpr"):
        return True
    after = significant(tokens, i + 1)
    return after < len(tokens) and tokens[after].text in ("const", "constexpr")


def rewritten(tokens):
    """Rewrites a detached piece of text (array bounds, template arguments, types, initialisers)."""
    t = Translation(list(tokens))
    t.numbers_and_swizzles()
    t.attributes()
    t.address_spaces()
    out, last = "", ""
    for i in range(len(t.tokens)):
        text = t.text(i)
        if text and last and (last[-1].isalnum() or last[-1] == "_") and (text[0].isalnum() or text[0] == "_"):
            out += " "
        out += text
        last = text or last
    return out


def render_type(tokens):
    return rewritten(tokens)


def template_parameter_names(tokens):
    names = []
    for piece in split_commas(tokens):
        words = [t for t in piece if t.kind not in SKIP]
        for k, t in enumerate(words):
            if t.text == "=":
                words = words[:k]
                break
        name = words[-1].text
        names.append(name + "..." if any(t.text == "..." for t in words) else name)
    return names


def assign_indices(kernel):
    """Buffers without an index take the first free ones in order."""
    for kind in ("buffer", "threadgroup"):
        taken = {int(p.index, 0) for p in kernel.parameters if p.kind == kind and p.index and p.index.isdigit()}
        following = 0
        for p in kernel.parameters:
            if p.kind == kind and p.index is None:
                while following in taken:
                    following += 1
                p.index = str(following)
                taken.add(following)


def translate(tokens, library, source, source_text):
    translation = Translation(tokens)
    translation.run()
    body = translation.render(0, len(tokens))
    opens_metal = any(t.text == "namespace" and tokens[significant(tokens, i + 1)].text == "metal"
                      and tokens[previous(tokens, i)].text != "using" for i, t in enumerate(tokens))
    # Internal linkage for everything keeps files with equal names apart; not possible if one specialises metal::.
    before, after = ("", "") if opens_metal else ("namespace {\n", '\n#line 1 "softmetal end"\n}\n')
    return '#include "softmetal_msl.h"\n' + before + body + after + table(translation, library, source, source_text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--depfile")
    parser.add_argument("-I", action="append", default=[], dest="include_dirs")
    parser.add_argument("-D", action="append", default=[], dest="defines")
    options = parser.parse_args()
    with open(options.source, encoding="utf-8") as f:
        source_text = f.read()
    text = preprocess(options.compiler, options.source, options.include_dirs, options.defines, options.depfile,
                      options.output)
    try:
        output = translate(tokenize(text, options.source), options.library, options.source, source_text)
    except TranslationError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    with open(options.output, "w", encoding="utf-8") as f:
        f.write(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
