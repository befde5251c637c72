"""Texts that are hard on a tokenizer: many scripts, code, emoji, marks, odd white space, controls, random Unicode.

corpus(count, seed, vocabulary) gives the same list whenever Python has the same Unicode version. The sentences were
written for this project.
"""
import random
import unicodedata

SENTENCES = [
    "The quick brown fox doesn't jump; it's asleep, and they're sure we've seen what I'd call \"enough\".",
    "Prices rose 12,345.67 % in 2024 (see p. 9), i.e. from $1 to €42 -- don't ask me WHY'D THEY'LL SAY.",
    "def f(x: int) -> dict[str, int]:\n    return {k: v ** 2 for k, v in zip('abc', range(x))}  # squares\n",
    "#include <vector>\ntemplate <class T>\nT sum(const std::vector<T>& v) {\n\tT s{};\n\tfor (auto& x : v) s += x;\n\n\n\treturn s;\n}\r\n",
    "SELECT a.id, COUNT(*) AS n FROM orders a LEFT JOIN t2 b ON a.id=b.ref WHERE b.x IS NOT NULL GROUP BY 1;",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2, "metric": true, "x": [1e-9, null]}}',
    "<div class=\"a b\"><a href='https://example.org/?q=1&amp;r=%20x#top'>link</a></div><!-- end -->",
    "今天天气很好，我们去公园散步吧。他说：“这本书一共３２１页！”",
    "吾輩は猫である。名前はまだ無い。カタカナもﾊﾝｶｸも、ｆｕｌｌも混ぜる。",
    "한국어 문장도 잘 나뉘어야 합니다. 값은 1,000원입니다.",
    "שלום עולם, מה שלומך היום? בְּרֵאשִׁית בָּרָא",
    "مرحبا بالعالم، كيف حالك؟ بِسْمِ ٱللَّهِ ١٢٣٤٥",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак, ґанок, ѕвезда.",
    "Ὦ ξεῖν’, ἀγγέλλειν Λακεδαιμονίοις ὅτι τῇδε κείμεθα. Άέήίόύώ",
    "हिन्दी में एक वाक्य जिसमें मात्राएँ हैं। क़िला ज़रा",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓ น้ำ",
    "Tiếng Việt có nhiều dấu: phở, đường, những, ngữ âm. Façade naïve coöperate Ångström ǅ ﬁne ﬀ",
    "বাংলা ভাষা কো তமிழ் மொழி తెలుగు ಕನ್ನಡ ക്ഷ മലയാളം සිංහල မြန်မာ ខ្មែរ ქართული հայերեն አማርኛ",
    "👩‍💻 and 👨‍👩‍👧‍👦 wave 👋🏽 at 🇨🇭🇯🇵 with ❤️‍🔥 #️⃣ 1️⃣ ☺︎ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β → γ ½ ² Ⅷ ① 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒙² ∑ᵢ",
    "  leading and trailing   \n\n\n  - item one\n  - item two\t\ttabbed\r\n\r\n    code\n",
    "user@host:~/src$ ls -la /usr/lib | grep -E '\\.so(\\.[0-9]+)*$' > out.txt && echo $?",
    "\\begin{align} \\frac{1}{2}\\sum_{i=0}^{n} x_i^2 &\\leq \\|x\\|_2 \\\\ \\end{align}",
    "He said:'s 't 'RE 'Ve 'm 'LL 'd 'ſ ’s ''s 'sss x'tis rock'n'roll O'REILLY'S",
]
CONTROL_TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<|im_start", "|im_end|>", "<think", "<<think>>", "< |im_end|>", "</", "<|",
]
SPACES = list("\t\n\v\f\r \x85\xa0") + [chr(c) for c in (
    0x1680, 0x180E, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF)]
MARKS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c))[0] == "M"]
NUMBERS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c))[0] == "N"]
COMPOSED = [chr(c) for c in range(0x110000) if unicodedata.decomposition(chr(c))[:1] not in ("", "<")]
BLOCKS = [  # where random code points are drawn from, so that every kind is common
    (0x20, 0x7F), (0x80, 0x250), (0x250, 0x530), (0x530, 0x800), (0x800, 0xE00), (0xE00, 0x1200), (0x1100, 0x1200),
    (0x1200, 0x2000), (0x2000, 0x2070), (0x2070, 0x2E00), (0x2E00, 0x3200), (0x3400, 0xA000), (0xA000, 0xAC00),
    (0xAC00, 0xD7A4), (0xE000, 0xF900), (0xF900, 0x10000), (0x10000, 0x11000), (0x11000, 0x12000), (0x12000, 0x1D000),
    (0x1D000, 0x1F000), (0x1F000, 0x20000), (0x20000, 0x33480), (0xE0000, 0xE0200), (0x33480, 0x110000),
]


class Maker:
    def __init__(self, seed, vocabulary):
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.kinds = [
            self.sentence, self.mutated, self.mixed, self.token_soup, self.one_block, self.any_unicode, self.marks,
            self.normal_forms, self.spaces, self.controls, self.numbers, self.contractions, self.control_tokens,
            self.jamo, self.long_run,
        ]

    def some(self, low, high, make):
        return "".join(make() for _ in range(self.random.randint(low, high)))

    def code_point(self, block=None):
        while True:
            code = self.random.randrange(*(block or self.random.choice(BLOCKS)))
            if not 0xD800 <= code < 0xE000:
                return chr(code)

    def pick(self, items):
        return lambda: self.random.choice(items)

    def sentence(self):
        return self.random.choice(SENTENCES)

    def mutated(self):
        text = list(self.sentence())
        for _ in range(self.random.randint(1, 6)):
            at = self.random.randrange(len(text) + 1)
            text[at:at + self.random.randint(0, 2)] = self.random.choice(
                [self.code_point(), self.random.choice(SPACES), self.random.choice(MARKS), "'", "<", "7"])
        return "".join(text)

    def mixed(self):
        def part():
            text = self.sentence()
            begin = self.random.randrange(len(text))
            return text[begin:begin + self.random.randint(1, 20)]
        return self.some(2, 10, part)

    def token_soup(self):
        return b"".join(self.random.choice(self.vocabulary)
                        for _ in range(self.random.randint(1, 40))).decode("utf-8", "replace")

    def one_block(self):
        block = self.random.choice(BLOCKS)
        return self.some(1, 40, lambda: self.code_point(block))

    def any_unicode(self):
        return self.some(1, 40, self.code_point)

    def marks(self):
        near = self.random.choice([MARKS, MARKS[:250]])
        bases = self.random.choice(["aeiouAEIOUcnsyz", COMPOSED, "אבגدرसのᄀ"])
        return self.some(1, 12, lambda: self.random.choice(bases) + self.some(0, 4, self.pick(near)))

    def normal_forms(self):
        form = self.random.choice(["NFC", "NFD", "NFKC", "NFKD"])
        return unicodedata.normalize(form, self.mixed() + self.some(0, 5, self.pick(COMPOSED)))

    def spaces(self):
        few = self.random.choice([" \n", " \t\r\n", SPACES])
        return self.some(1, 8, lambda: self.some(0, 6, self.pick(few)) + self.random.choice(["a", "7", "!", "", "é", "字"]))

    def controls(self):
        return self.some(1, 20, lambda: self.random.choice([chr(self.random.randrange(32)), chr(
            self.random.randrange(0x7F, 0xA0)), "x", " ", "-"]))

    def numbers(self):
        digits = self.random.choice(["0123456789", "0123456789.,", NUMBERS])
        return self.some(1, 60, self.pick(digits)) + self.random.choice(["", "kg", " %", "\n"])

    def contractions(self):
        return self.some(1, 15, lambda: self.random.choice(["'", "'", "’", ""]) + self.random.choice(
            "s t re ve m ll d S T RE Ve M LL lL D ſ r l v e x".split()) + self.random.choice(["", "", " ", "'"]))

    def control_tokens(self):
        return self.some(1, 8, lambda: self.random.choice(CONTROL_TOKENS) + self.random.choice(
            ["", "\n", " ", "user\n", self.random.choice(MARKS), self.mixed()]))

    def jamo(self):
        return self.some(1, 20, lambda: self.code_point(self.random.choice(
            [(0x1100, 0x1113), (0x1161, 0x1176), (0x11A7, 0x11C3), (0xAC00, 0xD7A4), (0x1100, 0x1200)])))

    def long_run(self):
        unit = self.random.choice(["a", "ab", "=", "-=", " ", "\n", " \n", "é", "字", "0", "\u0301", "ACGT", "haha"])
        return unit * self.random.randint(20, 400)


def corpus(count, seed, vocabulary):
    """`count` texts; `vocabulary` is the list of the tokens' bytes."""
    maker = Maker(seed, vocabulary)
    texts = ["", *SENTENCES, "\n".join(SENTENCES)]
    while len(texts) < count:
        texts.append(maker.kinds[len(texts) % len(maker.kinds)]())
    return texts[:count]


def damaged(count, seed):
    """Byte strings that are mostly not UTF-8: characters cut, joined with stray bytes, overlong forms, surrogates."""
    rng = random.Random(seed)
    parts = [*(t.encode() for t in "aé天👩\u0301 "), b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf8\x88", b"\xff",
             b"\xe0\x80", b"\xf0\x8f", b"\x80", b"\xbf\xc3"]

    def part():
        return rng.choice([rng.randbytes(rng.randint(1, 4)), rng.choice(parts), rng.choice(parts)[:rng.randint(1, 3)]])
    return [b"".join(part() for _ in range(rng.randint(1, 12))) for _ in range(count)]


def every_character():
    """For each code point a text that has it beside letters, digits, spaces, signs, quotes, marks and jamo."""
    return [f"a{c}b {c} {c}{c}'{c}1{c}!{c}\n{c}\u0301{c}\u0323\u0301a{c}\u0316 \u1100{c}\u11a8{c}"
            for c in map(chr, range(0x110000)) if not "\ud800" <= c <= "\udfff"]
