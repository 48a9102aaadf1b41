"""The tokenizer a GGUF file describes, built from the file's own metadata.

Encoding is the work of the `tokenizers` package, set up as the model was trained. Decoding is a
table from token to bytes: bytes of neighbouring tokens may form one character, so text is made from
bytes and never from tokens.
"""

import codecs
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from kvfast.engine import shown
from kvfast.planning.gguf_file import GGUFFile, ModelFileError

# tokenizer.ggml.token_type
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6

# Tokens that end a text, by name: a file's eos_token_id names only one of them.
_END_TOKENS = {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>"}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _ByteLevelStyle:
    """How a byte-level vocabulary was trained (`tokenizer.ggml.pre`)."""

    splits: tuple[str, ...]  # regular expressions that cut the text into words, one after the other
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a whole word of the vocabulary is taken even if no merges lead to it
    add_bos: bool = False


_STYLES = {
    "gpt-2": _ByteLevelStyle((_GPT2,)),
    "smollm": _ByteLevelStyle((r"\p{N}", _GPT2)),  # every digit is a word
    "llama-bpe": _ByteLevelStyle((_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": _ByteLevelStyle((_LLAMA3.replace("{1,3}", ""),), normalizer=normalizers.NFC()),
}


class Tokenizer:
    """Text to token ids and back, by a GGUF file whose tokenizer is byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    `tokens` is the vocabulary as the file spells it, `bos_id` the token that `encode` puts in front, or None, and `end_ids` are
    the tokens that end a text.
    """

    def __init__(self, source):
        file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        kind = file.text("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise ModelFileError(f"{file.path}: unsupported tokenizer {shown(kind)}; supported: gpt2, llama")
        self.tokens = file.items("tokenizer.ggml.tokens", str)
        self._types = file.items("tokenizer.ggml.token_type", int, [NORMAL] * len(self.tokens))
        if len(self._types) != len(self.tokens):
            raise ModelFileError(f"{file.path}: {len(self.tokens)} tokens but {len(self._types)} token types")

        if kind == "gpt2":
            self._encoder, add_bos = _byte_level_encoder(file, self.tokens)
            self._space_prefix = False
            self._bytes_of = _byte_alphabet()
        else:
            self._space_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
            self._encoder, add_bos = _sentencepiece_encoder(file, self.tokens, self._types, self._space_prefix)
            self._bytes_of = {"▁": b" "}
        self._add_whole_tokens()

        add_bos = file.get("tokenizer.ggml.add_bos_token", add_bos)
        self.bos_id = _named_id(file, "bos", self.tokens) if add_bos else None
        named = {_named_id(file, name, self.tokens) for name in ("eos", "eot")}
        known = {id for id, token in enumerate(self.tokens) if token in _END_TOKENS}
        self.end_ids = frozenset((named | known) - {None})

    def encode(self, text):
        """Tokenise text: a list of token ids.

        Control tokens spelled out in the text, such as "<|im_start|>", become those tokens. A character some of whose bytes are
        not in a byte-level vocabulary loses those bytes.
        """
        try:
            ids = self._encoder.encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError) as error:  # a lone surrogate
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids):
        """Token ids back to text; bytes that are not valid UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        # SentencePiece put a space in front of the text when it was encoded.
        return text[1:] if self._space_prefix and text.startswith(" ") else text

    def stream(self, ids):
        """Yield the text that each token of a continuation adds, never half a character. A last unfinished character becomes U+FFFD.

        `ids` may be endless: it is read one token at a time.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for id in ids:
            if text := decoder.decode(self.token_bytes(id)):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def token_bytes(self, id):
        """The UTF-8 bytes a token stands for; none for a control token."""
        token, kind = self.tokens[id], self._types[id]
        if kind == CONTROL:
            return b""
        if kind == USER_DEFINED:
            return token.encode()
        if kind == BYTE:  # "<0x0A>"
            return bytes([int(token[1:-1], 16)])
        return b"".join(self._bytes_of.get(char) or char.encode() for char in token)

    def _add_whole_tokens(self):
        """Make control and user-defined tokens match whole, before any splitting or merging."""
        for kind in (CONTROL, USER_DEFINED):
            whole = [token for token, of in zip(self.tokens, self._types, strict=True) if of == kind]
            self._encoder.add_tokens([AddedToken(t, normalized=False, special=kind == CONTROL) for t in whole])


def _byte_level_encoder(file, tokens):
    """(encoder, whether the model wants a BOS) of a GPT-2 style vocabulary."""
    name = file.text("tokenizer.ggml.pre", "gpt-2")
    if name not in _STYLES:
        raise ModelFileError(f"{file.path}: unsupported pre-tokenizer {shown(name)}; supported: {', '.join(_STYLES)}")
    style = _STYLES[name]
    merges = [tuple(merge.split(" ")) for merge in file.items("tokenizer.ggml.merges", str)]
    encoder = tokenizers.Tokenizer(_bpe(file, tokens, merges, ignore_merges=style.ignore_merges))
    if style.normalizer is not None:
        encoder.normalizer = style.normalizer
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in style.splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return encoder, style.add_bos


def _sentencepiece_encoder(file, tokens, types, space_prefix):
    """(encoder, whether the model wants a BOS) of a SentencePiece BPE vocabulary.

    SentencePiece merges the neighbours whose joined piece has the best score. That is BPE whose
    merges are all ways to cut each piece in two, ranked by the score of the whole.
    """
    scores = file.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    mergeable = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind not in (CONTROL, USER_DEFINED, BYTE)
    }
    merges = []
    for token in sorted(mergeable, key=mergeable.get, reverse=True):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in mergeable and right in mergeable]
    unknown = tokens[_named_id(file, "unknown", tokens) or 0]
    encoder = tokenizers.Tokenizer(_bpe(file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Replace(" ", "▁")]
    if space_prefix:
        steps.insert(0, normalizers.Prepend("▁"))
    encoder.normalizer = normalizers.Sequence(steps)
    return encoder, True


def _named_id(file, name, tokens):
    """The id of the token with a part to play (bos, eos, ...), or None."""
    id = file.get(f"tokenizer.ggml.{name}_token_id")
    if id is not None and (not isinstance(id, int) or not 0 <= id < len(tokens)):
        raise ModelFileError(f"{file.path}: the {name} token {shown(id)} is not one of the {len(tokens)} tokens")
    return id


def _bpe(file, tokens, merges, **options):
    """The `tokenizers` BPE model; a vocabulary it refuses is a ModelFileError."""
    try:
        return models.BPE({token: id for id, token in enumerate(tokens)}, merges, **options)
    except Exception as error:  # tokenizers raises plain Exception, for example on a merge of unknown tokens
        raise ModelFileError(f"{file.path}: the tokenizer is damaged: {error}") from error


def _byte_alphabet():
    """Character -> the byte it stands for in a GPT-2 style vocabulary.

    Printable bytes stand for themselves; the others were moved, in order, to U+0100 and above.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(moved)}
