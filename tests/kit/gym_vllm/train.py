"""Makes the tiny model: `make tiny-model`. Some minutes on two cores, nothing is downloaded.

    python -m gym_vllm.train [--folder DIR] [--steps N] [--seed N] [--threads N]

Trains until every held-out transcript and every row of the tests comes out right, token for token, or the steps are
used up. What does not pass the gate is not written over what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gym_vllm.language import ADDITIONS, CHAT_TOOLS, END, Task, chat, pieces, rows_of_tests, task
from gym_vllm.muon import Muon
from gym_vllm.tokenizer import make_tokenizer

MODEL = Path(__file__).parent / "model"
HELD_OUT = 384
BATCH = 16
WARM_UP = 30
CHECK_EVERY = 25
LEAST_MARGIN = 0.5  # between the two likeliest tokens: far above what another order of additions changes
IGNORE = -100


@dataclass(frozen=True)
class Figures:
    """What came out, kept beside the weights. `margin`: the smallest distance of the two likeliest tokens' logits."""

    parameters: int
    vocabulary: int
    steps: int
    seconds: float
    tokens_per_second: float
    seed: int
    held_out: int
    held_out_right: int
    rows: int
    rows_right: int
    margin: float
    longest_transcript: int
    shortest_generation: int
    longest_generation: int

    @property
    def passes(self) -> bool:
        """Every transcript right, and no token a close call."""
        right = (self.held_out_right, self.rows_right) == (self.held_out, self.rows)
        return right and self.margin >= LEAST_MARGIN


@dataclass(frozen=True)
class Transcript:
    """`labels`: the ids that the model has to say, and IGNORE elsewhere."""

    ids: list[int]
    labels: list[int]

    def generations(self) -> list[int]:
        """The lengths of what the model says, turn by turn."""
        lengths, run = [], 0
        for label in [*self.labels, IGNORE]:
            if label != IGNORE:
                run += 1
            elif run:
                lengths.append(run)
                run = 0
        return lengths


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> Transcript:
    ids: list[int] = []
    labels: list[int] = []
    for text, said in pieces(messages):
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += found
        labels += found if said else [IGNORE] * len(found)
    return Transcript(ids, labels)


def check_template(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> None:
    """What is trained on is what the chat template makes, turn by turn: a prompt begins with all that was before."""
    whole = encode(tokenizer, messages).ids
    for count in range(1, len(messages) + 1):
        templated = tokenizer.apply_chat_template(
            messages[:count], tools=CHAT_TOOLS, tokenize=True, return_dict=False, add_generation_prompt=False
        )
        if whole[: len(templated)] != templated:
            raise SystemExit("the chat template and the transcripts differ")


def collate(batch: Sequence[Transcript]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(one.ids) for one in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), IGNORE, dtype=torch.long)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        labels[row, : len(one.ids)] = torch.tensor(one.labels)
    return ids, labels


def batches(transcripts: Sequence[Transcript], source: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For ever. Neighbours in a batch are about equally long, so that little is padding."""
    while True:
        drawn = sorted(source.choices(transcripts, k=BATCH * 8), key=lambda one: len(one.ids))
        groups = [drawn[at : at + BATCH] for at in range(0, len(drawn), BATCH)]
        source.shuffle(groups)
        yield from map(collate, groups)


def logits(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels where something is said: the rest is not worth computing."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    said = wanted != IGNORE
    return model.lm_head(hidden[said]), wanted[said]


def right(model: Qwen3ForCausalLM, transcripts: Sequence[Transcript]) -> tuple[int, float]:
    """How many transcripts a greedy rollout would reproduce, and the smallest margin of those. The environment
    answers the same to the same calls, so a transcript whose every token is the likeliest is what a rollout says."""
    found, margin = 0, float("inf")
    ordered = sorted(transcripts, key=lambda one: len(one.ids))
    for at in range(0, len(ordered), 64):
        batch = ordered[at : at + 64]
        ids, labels = collate(batch)
        with torch.no_grad():
            scores, wanted = logits(model, ids, labels)
        two = scores.topk(2, -1)
        rows = (labels[:, 1:] != IGNORE).nonzero()[:, 0]
        for row in range(len(batch)):
            of = rows == row
            if bool((two.indices[of, 0] == wanted[of]).all()):
                found += 1
                margin = min(margin, float((two.values[of, 0] - two.values[of, 1]).min()))
    return found, margin


def train(folder: Path, steps: int, seed: int, threads: int) -> Figures:
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    source = random.Random(seed)
    tokenizer = make_tokenizer(folder, ADDITIONS)
    transcripts = [chat(task(source, ADDITIONS, held_out=False), source) for _ in range(6000)]
    for messages in transcripts[:20]:
        check_template(tokenizer, messages)
    training = [encode(tokenizer, messages) for messages in transcripts]
    checking = random.Random(seed + 1)
    held_out = [encode(tokenizer, chat(task(checking, ADDITIONS, held_out=True), checking)) for _ in range(HELD_OUT)]
    rows = [encode(tokenizer, chat(Task.of_row(row), random.Random(0))) for row in rows_of_tests()]
    longest = max(len(one.ids) for one in training)
    print(f"{len(tokenizer)} tokens in the vocabulary, transcripts of up to {longest} tokens", flush=True)
    model = _model(tokenizer)
    optimizers = _optimizers(model)
    began, tokens, done = time.monotonic(), 0, 0
    for step, (ids, labels) in enumerate(batches(training, source), 1):
        left = (steps - step) / (steps * 0.4)
        factor = min(1.0, step / WARM_UP, max(0.02, left))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["top"] * factor
        scores, wanted = logits(model, ids, labels)
        loss = functional.cross_entropy(scores, wanted)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        tokens, done = tokens + ids.numel(), step
        if step % CHECK_EVERY and step < steps:
            continue
        good, margin = right(model, held_out)
        print(f"step {step}: loss {loss.item():.4f}, held out {good}/{HELD_OUT}, margin {margin:.2f}", flush=True)
        if step >= steps or (good == HELD_OUT and margin >= 2 * LEAST_MARGIN):
            break
    seconds = time.monotonic() - began
    model.save_pretrained(folder)
    held_out_right, margin = right(model, held_out)
    rows_right, rows_margin = right(model, rows)
    lengths = [length for one in held_out for length in one.generations()]
    return Figures(
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=len(tokenizer),
        steps=done,
        seconds=round(seconds, 1),
        tokens_per_second=round(tokens / seconds, 1),
        seed=seed,
        held_out=len(held_out),
        held_out_right=held_out_right,
        rows=len(rows),
        rows_right=rows_right,
        margin=round(min(margin, rows_margin), 3),
        longest_transcript=max(len(one.ids) for one in [*training, *held_out]),
        shortest_generation=min(lengths),
        longest_generation=max(lengths),
    )


def _model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    end = tokenizer.convert_tokens_to_ids(END)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # smaller ones are refused by vLLM's attention on CPUs
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    found: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=6e-3),
        torch.optim.AdamW(rest, lr=6e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in found:
        for group in optimizer.param_groups:
            group["top"] = group["lr"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=800, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gym-tiny-model-") as scratch:
        made = Path(scratch) / "model"
        figures = train(made, given.steps, given.seed, given.threads)
        (made / "figures.json").write_text(json.dumps(asdict(figures), indent=2) + "\n")
        print(json.dumps(asdict(figures), indent=2))
        if not figures.passes:
            print(
                f"the gate is not passed: {given.folder} stays as it is; train longer with --steps", file=sys.stderr
            )
            return 1
        shutil.rmtree(given.folder, ignore_errors=True)
        shutil.copytree(made, given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
