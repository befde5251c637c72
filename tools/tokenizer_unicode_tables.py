#!/usr/bin/env python3
"""Writes src/tokenizer/unicode_tables.inc: the character classes that the split regex needs, and the characters that
the reference normaliser does not know.

    pip install tokenizers unicodedata2
    tools/tokenizer_unicode_tables.py src/tokenizer/unicode_tables.inc

Token ids must not depend on which Unicode version the machine's PCRE2 or utf8proc has, so the classes are asked of the
reference itself (Hugging Face tokenizers): its regex engine and its NFC have their own versions, and the two differ.
"""
import sys

import unicodedata2
from tokenizers import Regex, normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CLASSES = [("kLetter", r"\p{L}"), ("kMark", r"\p{M}"), ("kNumber", r"\p{N}"), ("kSpace", r"\s")]


def matching(regex):
    """The code points that the reference's regex engine matches."""
    split = pre_tokenizers.Split(Regex(regex), "removed")
    missed = set()
    for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, CODE_POINTS))):
        missed.update(range(begin, end))
    return {c for i, c in enumerate(CODE_POINTS) if i not in missed}


def unknown_to_reference_nfc():
    """Code points that today's Unicode reorders or composes and the reference leaves alone."""
    nfc = normalizers.NFC().normalize_str
    unknown = set()
    for code in CODE_POINTS:
        char = chr(code)
        if unicodedata2.combining(char):
            # A mark it knows is sorted among marks of a lower and of a higher class.
            probes = ["\u2d30\u0345" + char, "\u2d30" + char + "\u0334"]
        elif unicodedata2.decomposition(char) and not unicodedata2.decomposition(char).startswith("<"):
            probes = [unicodedata2.normalize("NFD", char), char]
        else:
            continue
        if any(nfc(p) != unicodedata2.normalize("NFC", p) for p in probes):
            unknown.add(code)
            if not unicodedata2.combining(char):  # the parts of an unknown composite compose with each other only
                unknown.update(c for c in map(ord, unicodedata2.normalize("NFD", char)) if is_new_part(c, nfc))
    return unknown


def is_new_part(code, nfc):
    """Whether the reference composes nothing that ends in this code point."""
    for whole in CODE_POINTS:
        parts = unicodedata2.normalize("NFD", chr(whole))
        if len(parts) > 1 and ord(parts[-1]) == code and nfc(parts) != parts:
            return False
    return True


def ranges(codes):
    out = []
    for code in sorted(codes):
        if out and out[-1][1] == code - 1:
            out[-1][1] = code
        else:
            out.append([code, code])
    return out


def wrapped(items, width=110):
    lines, line = [], "   "
    for item in items:
        if len(line) + len(item) + 2 > width:
            lines.append(line)
            line = "   "
        line += " " + item + ","
    return lines + [line]


def main():
    of = {}
    for name, regex in CLASSES:
        for code in matching(regex):
            assert code not in of
            of[code] = name
    changes, previous = [], "kOther"
    for code in range(0x110000):
        kind = of.get(code, "kOther")
        if kind != previous:
            changes.append("{0x%x, %s}" % (code, kind))
            previous = kind
    unknown = ranges(unknown_to_reference_nfc())
    lines = [
        "// Written by tools/tokenizer_unicode_tables.py from the behaviour of the reference (Hugging Face tokenizers);",
        "// do not edit. The data follow from the Unicode Character Database, (c) Unicode, Inc., Unicode License v3.",
        "",
        "// Where the class of the code points changes: from `first` on it is `kind`, until the next entry.",
        "constexpr ClassChange kClassChanges[] = {",
        *wrapped(changes),
        "};",
        "",
        "// Marks and composites that newer Unicode versions have and the reference normaliser leaves alone.",
        "constexpr CodeRange kUnknownToNfc[] = {",
        *wrapped(["{0x%x, 0x%x}" % tuple(r) for r in unknown]),
        "};",
    ]
    with open(sys.argv[1], "w", encoding="ascii") as out:
        out.write("\n".join(lines) + "\n")
    print(f"{len(changes)} class changes, {len(unknown)} ranges unknown to the reference's NFC")


main()
