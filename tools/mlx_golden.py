#!/usr/bin/env python3
"""How far MLX-LM's own arithmetic is from a golden file: its model code, with activations in bf16, fp16 or fp32.

    pip install "mlx[cpu]" mlx-lm        (on a Mac: mlx mlx-lm)
    mlx_golden.py tests/data/tiny-random [--dtype bfloat16|float16|float32] [--products exact|own]

exact: every quantised product in fp32, its result rounded to the activations' type: what fp32 sums, as MLX's GPU
kernels have them, come to at best. own: what MLX computes on this machine.
Prints, as `calla selftest` does, the error of logits (RMS, relative to their spread), of log-probabilities, of states
(norm), the share of equal best tokens and the relative difference in perplexity. docs/metal.md has the results.
"""
import argparse
import math
import pathlib

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

CHUNK = 64  # rows of a prefill step, as in Calla's golden tests


def array(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


def exact_products():
    def weights(w, scales, biases, group_size, bits, transpose):
        full = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
        return mx.swapaxes(full, -1, -2) if transpose else full

    def quantized_matmul(x, w, scales, biases, transpose=True, group_size=64, bits=4, mode="affine",
                         **others):
        assert mode == "affine" and not any(others.values())
        return (x.astype(mx.float32) @ weights(w, scales, biases, group_size, bits, transpose)).astype(x.dtype)

    def gather_qmm(x, w, scales, biases, lhs_indices=None, rhs_indices=None, transpose=True, group_size=64, bits=4,
                   mode="affine", sorted_indices=False, **others):
        assert mode == "affine" and not any(others.values())
        return mx.gather_mm(x.astype(mx.float32), weights(w, scales, biases, group_size, bits, transpose),
                            lhs_indices=lhs_indices, rhs_indices=rhs_indices,
                            sorted_indices=sorted_indices).astype(x.dtype)

    mx.quantized_matmul, mx.gather_qmm = quantized_matmul, gather_qmm


def spread_error(found, golden):
    return math.sqrt(((found - golden) ** 2).mean() / golden.var())


def norm_error(found, golden):
    return float(np.linalg.norm(found - golden) / np.linalg.norm(golden))


def log_probabilities(logits, tokens):
    """Of token t + 1 after tokens 0..t."""
    top = logits.max(-1, keepdims=True)
    normed = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return normed[np.arange(len(tokens) - 1), tokens[1:]]


class Golden:
    def __init__(self, model, tensors):
        self.model, self.tensors = model, tensors

    def ids(self, name):
        return [int(i) for i in np.array(self.tensors[name])]

    def values(self, name):
        return array(self.tensors[name])

    def run(self, tokens):
        cache = self.model.make_cache()
        rows = [array(self.model(mx.array(tokens[i:i + CHUNK])[None], cache=cache)[0])
                for i in range(0, len(tokens), CHUNK)]
        return np.concatenate(rows), cache

    def teacher_forced(self, case):
        tokens = self.ids(case + "/input_ids")
        logits, cache = self.run(tokens)
        line = [case]
        if case + "/logits" in self.tensors:
            golden = self.values(case + "/logits")
            line.append(f"logits {spread_error(logits, golden):.4f}")
            line.append(f"top-1 {(logits.argmax(-1) == golden.argmax(-1)).mean():.4f}")
        if case + "/logits_last8" in self.tensors:
            line.append(f"last logits {spread_error(logits[-8:], self.values(case + '/logits_last8')):.4f}")
        if case + "/argmax" in self.tensors:
            line.append(f"top-1 {(logits.argmax(-1) == np.array(self.ids(case + '/argmax'))).mean():.4f}")
        if case + "/next_logprob" in self.tensors:
            found, golden = log_probabilities(logits, tokens), self.values(case + "/next_logprob")
            line.append(f"log-probabilities {spread_error(found, golden):.4f}")
            line.append(f"perplexity {math.expm1((golden - found).mean()):+.5f}")
        for name in sorted(self.tensors):
            if name.startswith(case + "/gdn") and name.endswith("/state"):  # MLX: [value][key] of a head
                state = np.swapaxes(array(cache[int(name.split("/")[1][3:])][1])[0], -1, -2)
                line.append(f"{name.split('/', 1)[1]} {norm_error(state, self.values(name)):.4f}")
            if name.startswith(case + "/attn"):
                which = 0 if name.endswith("k_cache") else 1
                rows = array(cache[int(name.split("/")[1][4:])].state[which])[0][:, :len(tokens)]
                line.append(f"{name.split('/', 1)[1]} {norm_error(rows, self.values(name)):.4f}")
        print("  ".join(line), flush=True)

    def greedy(self, case, prompt):
        cache = self.model.make_cache()
        out = self.model(mx.array(self.ids(prompt))[None], cache=cache)
        expected, margin = self.ids(case + "/output_ids"), self.values(case + "/margin")
        for i, token in enumerate(expected):
            if int(array(out[0, -1]).argmax()) != token:
                print(f"{case}  differs at token {i} of {len(expected)}, where the golden margin is {margin[i]:.3f}")
                return
            out = self.model(mx.array([[token]]), cache=cache)
        print(f"{case}  equal")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("model", type=pathlib.Path)
    arguments.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    arguments.add_argument("--products", choices=["exact", "own"], default="exact")
    options = arguments.parse_args()
    if options.products == "exact":
        exact_products()
    model, _ = load_model(options.model)
    model.set_dtype(getattr(mx, options.dtype))
    golden = Golden(model, mx.load(str(options.model / "golden.safetensors")))
    print(f"mlx {mx.__version__} on {mx.default_device()}, {options.dtype}, {options.products} products")
    cases = sorted({name.split("/")[0] for name in golden.tensors})
    for case in cases:
        if case + "/logprob_w512" in golden.tensors:
            continue
        if case + "/input_ids" in golden.tensors:
            golden.teacher_forced(case)
        elif case + "/prompt_ids" in golden.tensors:
            golden.greedy(case, case + "/prompt_ids")
        elif case.startswith("greedy"):
            golden.greedy(case, "len" + case[len("greedy"):] + "/input_ids")


if __name__ == "__main__":
    main()
