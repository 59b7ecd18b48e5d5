"""The tokenizer of the presets: one token per byte, whose id is the byte, then the special tokens.

Invariant: it reads any text, and gives it back exactly. There are no merges, no normalisation and no tokens added at
either end. `miles.models.presets` writes it; `miles.models.tokenizer` and transformers load it.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
PAD_ID = 256
EOS_ID = 257
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def _characters_of_bytes() -> list[str]:
    """The printable stand-in that the ByteLevel pre-tokenizer uses for each byte.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_byte_tokenizer(folder: Path, *, context_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # `miles check` needs the ids only

    vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
