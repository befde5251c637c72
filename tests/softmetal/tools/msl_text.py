"""Tokens of preprocessed Metal text, and the few questions that the translator and the conformance check ask of them.

Text is kept exactly: joining all token texts gives the input back. Columns are lost, line numbers are not, because the
preprocessor's line markers stay in the stream.
"""
import re
import subprocess

TOKEN = re.compile(r"""
    (?P<space>[ \t\r\f\v]+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<directive>(?<![^\n])[ \t]*\#[^\n]*)
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
  | (?P<char>'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?\d(?:[eEpP][+-]|['\w.])*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<punct>->|\+\+|--|<<=|>>=|<=>|<<|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|/=|%=|&=|\|=|\^=|::|\.\.\.|\[\[|[-+*/%&|^~!<>=?:;,.(){}\[\]\#@\\])
""", re.X | re.S)

SKIP = {"space", "newline", "comment", "directive"}
CLOSERS = {"(": ")", "{": "}", "[": "]", "[[": "]"}


class Token:
    __slots__ = ("kind", "text", "file", "line")

    def __init__(self, kind, text, file, line):
        self.kind, self.text, self.file, self.line = kind, text, file, line

    def __repr__(self):
        return f"{self.text!r}@{self.line}"


class TranslationError(Exception):
    def __init__(self, token, message):
        where = f"{token.file}:{token.line}: " if token else ""
        super().__init__(where + message)


def tokenize(text, file="<text>"):
    tokens, line, at = [], 1, 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise TranslationError(Token("", "", file, line), f"unexpected character {text[at]!r}")
        kind, value = match.lastgroup, match.group()
        token = Token(kind, value, file, line)
        tokens.append(token)
        at = match.end()
        if kind == "directive":
            marker = re.match(r'\s*#\s*(?:line\s+)?(\d+)\s+"((?:[^"\\]|\\.)*)"', value)
            if marker:
                line, file = int(marker.group(1)) - 1, marker.group(2)
                token.text = f'#line {marker.group(1)} "{marker.group(2)}"'
            elif re.match(r"\s*#\s*pragma\b", value):
                token.text = ""  # unroll hints and METAL pragmas mean nothing here
        line += value.count("\n")
    return tokens


def join(tokens):
    return "".join(t.text for t in tokens)


def significant(tokens, i):
    """Index of the first token at or after i that is not space; len(tokens) at the end."""
    while i < len(tokens) and tokens[i].kind in SKIP:
        i += 1
    return i


def previous(tokens, i):
    """Index of the last token before i that is not space, or -1."""
    i -= 1
    while i >= 0 and tokens[i].kind in SKIP:
        i -= 1
    return i


def matching(tokens, i):
    """Index of the bracket that closes tokens[i] ('(', '{', '[' or '[[', whose end is its second ']')."""
    opener = tokens[i].text
    stack = []
    while i < len(tokens):
        text = tokens[i].text
        if tokens[i].kind == "punct":
            if text == "[[":
                stack += ["]", "]"]
            elif text in CLOSERS:
                stack.append(CLOSERS[text])
            elif text in (")", "}", "]"):
                if not stack or stack.pop() != text:
                    raise TranslationError(tokens[i], f"unbalanced {text!r}")
                if not stack:
                    return i
        i += 1
    raise TranslationError(tokens[-1], f"no closing bracket for {opener!r}")


def matching_angle(tokens, i):
    """Index of the '>' that closes the template list opened at i. Comparison operators must be in parentheses."""
    depth = 0
    while i < len(tokens):
        text = tokens[i].text
        if text in ("(", "{", "[", "[["):
            i = matching(tokens, i)
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise TranslationError(tokens[-1], "no closing '>'")


def split_commas(tokens):
    """Top-level comma-separated pieces of a token list; brackets and template lists are kept whole."""
    pieces, current, i = [], [], 0
    while i < len(tokens):
        t = tokens[i]
        if t.kind == "punct" and t.text in ("(", "{", "[", "[["):
            end = matching(tokens, i)
            current += tokens[i:end + 1]
            i = end + 1
            continue
        if t.text == "<":
            try:
                end = matching_angle(tokens, i)
                current += tokens[i:end + 1]
                i = end + 1
                continue
            except TranslationError:
                pass
        if t.text == ",":
            pieces.append(current)
            current = []
        else:
            current.append(t)
        i += 1
    if any(t.kind not in SKIP for t in current):
        pieces.append(current)
    return pieces


def attributes_in(tokens):
    """(name, argument text) of each attribute in a '[[...]]' token list, brackets included."""
    inner = tokens[1:-2]
    found = []
    for piece in split_commas(inner):
        words = [t for t in piece if t.kind not in SKIP]
        if not words:
            continue
        name = words[0].text
        argument = ""
        if len(words) > 1 and words[1].text == "(":
            argument = join(words[2:-1])
        elif len(words) > 2 and words[1].text == "::":
            name = join(words)
        found.append((name, argument))
    return found


def number(token):
    """A literal as C++ has it: without a suffix MSL's are float."""
    text = token.text
    if text[:2] in ("0x", "0X") and "." not in text and "p" not in text.lower():
        return text
    lower = text.lower()
    if lower.endswith("bf"):
        return f"bfloat({float_literal(text[:-2])})"
    if lower.endswith("h"):
        return f"half({float_literal(text[:-1])})"
    is_float = "." in text or (("e" in lower or "p" in lower) and not lower.startswith("0x")) or "p" in lower
    if is_float and lower[-1] not in "fl":
        return text + "f"
    if is_float and lower[-1] == "l":
        raise TranslationError(token, f"{text}: no long double in MSL")
    return text


def float_literal(text):
    return text + "f" if "." in text or "e" in text.lower() else text + ".0f"


# What Apple's compiler predefines, as far as kernels ask.
PREDEFINED = {
    "__METAL__": "1",
    "__METAL_VERSION__": "400",
    "__METAL_MACOS__": "1",
    "__HAVE_BFLOAT__": "1",
    "__HAVE_TENSOR__": "1",
}


def preprocess(compiler, source, include_dirs, defines, depfile=None, target=None):
    """Runs the C++ preprocessor as Apple's would run: MSL macros, no system headers."""
    command = [compiler, "-E", "-x", "c++", "-std=c++20", "-undef", "-nostdinc", "-nostdinc++", "-w"]
    for name, value in PREDEFINED.items():
        command.append(f"-D{name}={value}")
    command += [f"-D{d}" for d in defines]
    command += [f"-I{d}" for d in include_dirs]
    if depfile:
        command += ["-MD", "-MF", depfile, "-MT", target]
    command.append(source)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(result.stderr or f"{compiler} -E {source} failed")
    return result.stdout
