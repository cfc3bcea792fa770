"""The tiny model's tokenizer: every digit a token, words and runs of JSON whole, any other text as bytes."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gym_vllm.language import CHAT_TEMPLATE, END, PAD, RESPONSE_TEMPLATE, SPECIAL, TAGS, chat, pieces, task

TRANSCRIPTS = 600
_SPLIT = r'\d|\{"[^\d{}]*| ?[A-Za-z_]+|[^A-Za-z_\d]+?(?=[ \d]|$)|.'
_MARKS = re.compile("|".join(map(re.escape, (*SPECIAL, *TAGS))))


def make_tokenizer(folder: Path, additions: tuple[int, int]) -> PreTrainedTokenizerFast:
    """Train it on transcripts and save it; the same arguments make the same one."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    source = random.Random(1)
    texts = []
    for _ in range(TRANSCRIPTS):
        whole = "".join(text for text, _ in pieces(chat(task(source, additions, held_out=False), source)))
        # Training does not stop at marks by itself, and would learn words across them.
        texts += [text for text in _MARKS.split(whole) if text]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=TRANSCRIPTS // 10,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bare.train_from_iterator(texts, trainer)
    bare.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    made.chat_template = CHAT_TEMPLATE
    made.response_template = RESPONSE_TEMPLATE
    made.save_pretrained(folder)
    return made
