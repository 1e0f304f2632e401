"""Let a chat model ask itself questions and answer them, and keep what a draft head learns from.

Given the opening of a user's turn, an instruction-tuned model writes a question of the kind that
it was tuned on (the idea of Magpie, Xu et al., 2024, arXiv:2406.08464). Here it's given a first
word or two as well: left alone, this model asks little but what a chatbot is asked. Questions are
sampled and therefore differ; the answer to each is greedy, as it is in decoding. No text from
anywhere else is needed.

Run in the environment of ``make build``, best with one process a core and a seed each::

    for seed in 1 2; do .venv/bin/python tools/dialogues.py --seed $seed & done
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from texts import Text, save_texts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from specmeta.models import resolve

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "smollm2"
# The folder in WORK; one file for every `SHARD` dialogues.
DIALOGUES = "dialogues"
SHARD = 200
AUX_LAYER_IDS = (2, 15, 27)
MAX_QUESTION = 80
TOP_K = 50
# How questions begin. The empty one leaves it to the model.
STARTS = """
|What is|What is the|What are|What are the main|What does the word|What happens when
|What would happen if|Who was|Who invented|Who wrote|When did|When was the|Where is
|Where can I find|Where do|Which country|Which is better|Why is|Why do|Why does the|Why did
|How do I|How does|How does a|How can I|How many|How much|How far|How long does|Is it true that
|Are there|Can you explain|Can you recommend|Could you|Do you know|Does|Should I|Explain
|Explain how|Explain the concept of|Explain to a child why|Describe|Describe the
|Describe a day in the life of|Define|Summarize the|Compare|Contrast the|List|List three
|List the steps to|Name five|Give me|Give me a recipe for|Give an example of|Tell me about
|Tell me a|Tell me a story about|Write a|Write a short story about|Write a poem about
|Write a letter to|Write an email to|Write a Python function|Write a function that
|Write a SQL query|Write an essay about|Write a dialogue between|Write a review of
|Write a product description|Write a speech|Create a|Create a list of|Design a|Plan a|Suggest
|Suggest a name for|Translate|Rewrite|Rewrite the sentence|Correct the grammar|Classify|Calculate
|Solve|If|If a train|Imagine|Imagine you are|Pretend|Help me|I want to|I have|I need|I am|My
|My friend|My computer|In Python|In the year|In what|During|The|A|Once|Please|Convert|Find the
|Prove that|Discuss|Analyze|Outline|Provide|Generate|Make|Choose|Identify|As a|Act as|Hi|Hello
|Thank you|Good morning
""".replace("\n", "").split("|")


class _Cache:
    """Keys and values of all rows, side by side: [rows, kv_heads, max_len, head_dim] a layer."""

    def __init__(self, target: LlamaForCausalLM, *, rows: int, max_len: int) -> None:
        config = target.config
        shape = (rows, config.num_key_value_heads, max_len, config.head_dim)
        self.keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]


def _attend_by_row(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_cache: _Cache,
    positions: Tensor,
    mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend with one new token a row, each at a position of its own."""
    rows, heads, _, width = query.shape
    keys, values = row_cache.keys[module.layer_idx], row_cache.values[module.layer_idx]
    index = torch.arange(rows)
    keys[index, :, positions] = key[:, :, 0]
    values[index, :, positions] = value[:, :, 0]
    length = mask.shape[-1]
    attended = scaled_dot_product_attention(
        query.view(rows, keys.shape[1], -1, width),
        keys[:, :, :length],
        values[:, :, :length],
        attn_mask=mask,
    )
    return attended.reshape(rows, 1, heads, width), None


AttentionInterface.register("by_row", _attend_by_row)


@torch.no_grad()
def self_dialogues(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    aux_layer_ids: tuple[int, ...],
    rows: int,
    max_answer: int,
    seed: int,
) -> Iterator[Text]:
    """Yield dialogues without end.

    Parameters
    ----------
    target : LlamaForCausalLM
        The model.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer, with a chat template.
    aux_layer_ids : tuple of int
        Hidden states to keep: i is the input of layer i.
    rows : int
        Dialogues written at a time.
    max_answer : int
        Most tokens an answer. Questions of more than `MAX_QUESTION` tokens are dropped.
    seed : int
        Of the questions.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    opening, turn = (encode(text) for text in whole.split(mark))
    end = turn[0]
    beginnings = [encode(text) for text in STARTS]
    max_len = len(opening) + MAX_QUESTION + len(turn) + max_answer
    target.set_attn_implementation("by_row")
    cache = _Cache(target, rows=rows, max_len=max_len)
    generator = torch.Generator().manual_seed(seed)
    aux_ids = list(aux_layer_ids)
    width = (len(aux_ids) + 1) * target.config.hidden_size
    hidden = torch.zeros(rows, max_len, width, dtype=torch.float16)

    def start() -> list[int]:
        choice = int(torch.randint(len(beginnings), (), generator=generator))
        return opening + beginnings[choice]

    texts = [start() for _ in range(rows)]
    starts = [0] * rows  # where the answer begins, once the question is asked
    # The opening is the same for all and is read once: a row's keys of it stay where they are.
    done = [0] * rows
    index = torch.arange(rows)
    while True:
        positions = torch.tensor(done)
        tokens = torch.tensor([text[n] for text, n in zip(texts, done, strict=True)])
        mask = torch.arange(int(positions.max()) + 1) <= positions[:, None]
        output = target.model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            use_cache=False,
            output_hidden_states=aux_ids,
            row_cache=cache,
            positions=positions,
            mask=mask[:, None, None],
        )
        last = output.last_hidden_state[:, 0]
        states = [output.hidden_states[i][:, 0] for i in aux_ids]
        hidden[index, positions] = torch.cat([*states, last], dim=-1).half()
        done = [n + 1 for n in done]
        logits = target.lm_head(last)
        greedy = logits.argmax(-1).tolist()
        best, candidates = logits.topk(TOP_K)
        choice = torch.multinomial(best.softmax(-1), 1, generator=generator)
        sampled = candidates.gather(1, choice)[:, 0].tolist()
        for row, text in enumerate(texts):
            if done[row] < len(text):
                continue
            asking = not starts[row]
            text.append(sampled[row] if asking else greedy[row])
            if asking and text[-1] == end and len(text) > len(opening) + 1:
                text += turn[1:]
                starts[row] = len(text)
            elif asking and (text[-1] == end or len(text) == len(opening) + MAX_QUESTION):
                texts[row], done[row] = start(), len(opening) - 1
            elif not asking and (text[-1] == end or len(text) == starts[row] + max_answer):
                states = hidden[row, : len(text)].clone()
                states[-1] = 0
                yield Text(torch.tensor(text), starts[row], states)
                texts[row], starts[row], done[row] = start(), 0, len(opening) - 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=WORK, help="folder to write to")
    parser.add_argument("--seed", type=int, default=1, help="each gives other dialogues")
    parser.add_argument("--count", type=int, default=4000, help="dialogues")
    parser.add_argument("--rows", type=int, default=96, help="dialogues written at a time")
    parser.add_argument("--max-answer", type=int, default=192, help="tokens an answer")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    folder = resolve("smollm2")
    texts = self_dialogues(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        aux_layer_ids=AUX_LAYER_IDS,
        rows=args.rows,
        max_answer=args.max_answer,
        seed=args.seed,
    )
    progress = iter(tqdm(texts, total=args.count, desc="dialogues"))
    for shard in range(-(-args.count // SHARD)):
        part = list(islice(progress, SHARD))
        save_texts(args.work / DIALOGUES / f"{args.seed:03d}-{shard:03d}.pt", part)


if __name__ == "__main__":
    main()
