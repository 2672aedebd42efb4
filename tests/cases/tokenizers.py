"""Small tokenizers of every kind of decoder, built in milliseconds without torch."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from toka_async.text.tokenizer import Tokenizer

SPECIALS = ("<s>", "</s>")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CORPUS = (
    "Question: what is the answer? Answer: the answer is 42. Question: the end",
    "你好，世界！今天天气怎么样？今天你好吗",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 😀😃😀😃",
    "e\u0301te\u0301 नमस्ते ก็ Ünïcödé",
    "def f(x):\n\treturn x ** 2\n\n",
)
WORDS = ("▁the", "▁answer", "▁is", "▁▁", "he", "Question", ":", "你好", "é", "▁😀", "\n", "e\u0301", "tion:")


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: tokens are bytes in an alphabet, some of them parts of characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    _add_specials(backend)
    backend.add_tokens([AddedToken("<tool> ☃", normalized=False)])
    return Tokenizer(backend, NAMES)


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: spaces are ▁, one is put before the text, unknown characters are byte tokens."""
    vocab = {token: i for i, token in enumerate(("<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))))}
    backend = tokenizers.Tokenizer(_bpe(vocab, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _add_specials(backend)
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return Tokenizer(backend, NAMES)


@cache
def metaspace() -> Tokenizer:
    """As SentencePiece without bytes: the first token loses its ▁, those of other tokens are spaces."""
    backend = tokenizers.Tokenizer(_bpe({"<unk>": 0, "<s>": 1, "</s>": 2}, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    _add_specials(backend)
    return Tokenizer(backend, NAMES)


@cache
def word_piece() -> Tokenizer:
    """As BERT: ## continues a word, and spaces before punctuation are taken away."""
    words = (
        *("[UNK]", "the", "answer", "is", "##s", "##er", ".", ","),
        *("n't", "你", "##你", "do", "##not", "'", "not", "'s"),
    )
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    _add_specials(backend)
    return Tokenizer(backend, NAMES)


@cache
def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    words = ("[UNK]", "the", "answer", "is", "42", "", " ")
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _add_specials(backend)
    return Tokenizer(backend, NAMES)


ALL = (byte_level, byte_fallback, metaspace, word_piece, word_level)


def _bpe(vocab: dict[str, int], byte_fallback: bool) -> models.BPE:
    """A vocabulary of all characters and prefixes of WORDS after the tokens of `vocab`."""
    merges = []
    for word in WORDS:
        for char in word:
            vocab.setdefault(char, len(vocab))
        for end in range(2, len(word) + 1):
            vocab.setdefault(word[:end], len(vocab))
            merges.append((word[: end - 1], word[end - 1]))
    return models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True)


def _add_specials(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
