"""Train the EAGLE-3 draft head of a built-in model on the frozen target, then measure it.

Run in the environment of ``make build``. ``train_draft.py austen`` needs what ``train_target.py``
needs, and its output; ``train_draft.py smollm2`` needs dialogues: run ``dialogues.py`` first.
A run that was stopped goes on from its last checkpoint, unless the target, the texts or the shape
of the head have changed. ``--eval-only`` measures the stored head.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import texts as text_files
import torch
from dialogues import AUX_LAYER_IDS, DIALOGUES, ROOT
from texts import Batch, Text
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from training import train
from transformers import AttentionInterface, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specmeta.models import BUILT_IN, resolve
from specmeta.models.eagle3 import Eagle3Config, Eagle3Head

PACKAGE = ROOT / "specmeta" / "models"
QUESTIONS = Path(__file__).with_name("questions.txt")
# What differs between the models. A head that drafts for another's vocabulary of this size takes
# the target's embedding instead of one of its own, which would be most of its weights.
SETTINGS: dict[str, dict[str, Any]] = {
    "austen": {
        "aux_layer_ids": (1, 2, 3),
        "own_embedding": True,
        "draft_vocab_size": 512,
        "intermediate_size": 512,
        "steps": 1000,
        "learning_rate": 2e-3,
        "warmup": 60,
        "unroll": 4,
        "decay": 0.9,
    },
    "smollm2": {
        "aux_layer_ids": AUX_LAYER_IDS,
        "own_embedding": False,
        "draft_vocab_size": 4096,
        "intermediate_size": 1024,
        "steps": 1500,
        "learning_rate": 1e-3,
        "warmup": 100,
        "unroll": 3,
        "decay": 0.7,
    },
}
# austen's prompts are windows of the novels: tokens a prompt, and of the text after it.
PROMPT, NEW_TOKENS, CONTINUATIONS = 48, 152, 2048


def unrolled_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    steps: list[tuple[Tensor, Tensor]],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as draft step k does in decoding, for every position of a sequence at once.

    A query of step k at position p sees the first step's keys up to p, which come from the
    target's hidden states, and one key of each later step: the one drafted on from p.

    Parameters
    ----------
    module : LlamaAttention
        The attention that calls.
    query : Tensor
        [batch, heads, T, head_dim].
    key, value : Tensor
        [batch, kv_heads, T, head_dim].
    attention_mask : Tensor
        [T, T], additive and causal.
    scaling : float
        What scores are multiplied by.
    steps : list of (Tensor, Tensor)
        Keys and values of the earlier steps, to which this step's are appended.

    Returns
    -------
    tuple of (Tensor, None)
        [batch, T, heads, head_dim], and no attention weights.
    """
    batch, heads, length, width = query.shape
    steps.append((key.unsqueeze(2), value.unsqueeze(2)))
    (first_key, first_value), later = steps[0], steps[1:]
    grouped = query.view(batch, -1, module.num_key_value_groups, length, width) * scaling
    scores = [grouped @ first_key.transpose(-1, -2) + attention_mask]
    scores += [(grouped * own_key).sum(-1, keepdim=True) for own_key, _ in later]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    output = weights[..., :length] @ first_value
    for index, (_, own_value) in enumerate(later, start=length):
        output = output + weights[..., index : index + 1] * own_value
    return output.reshape(batch, heads, length, width).transpose(1, 2), None


AttentionInterface.register("unrolled", unrolled_attention)


def causal_mask(length: int) -> Tensor:
    """Return an additive causal mask, float32 [length, length]."""
    return torch.full((length, length), float("-inf")).triu(1)


def unrolled_loss(
    head: Eagle3Head, batch: Batch, output: Tensor, *, decay: float, steps: int
) -> Tensor:
    """Return the loss of training-time test: the head's draft steps, unrolled.

    Step k at position p reads token p + 1 + k and predicts token p + 2 + k, for which the
    target's own distribution is that of its position p + 1 + k.

    Parameters
    ----------
    head : Eagle3Head
        With the attention function "unrolled".
    batch : Batch
        What to learn.
    output : Tensor
        [draft_vocab, hidden]: the rows of the target's output matrix that the head drafts.
    decay : float
        Weight of a step's loss relative to that of the step before.
    steps : int
        Draft steps to unroll.

    Returns
    -------
    Tensor
        A scalar.
    """
    length = batch.ids.shape[1] - steps
    aux, last = split_states(head, batch.states)
    with torch.no_grad():
        labels = (last @ output.T).softmax(-1)
    hidden = head.combine_aux(aux[:, :length])
    positions, mask = torch.arange(length)[None], causal_mask(length)
    seen: list[tuple[Tensor, Tensor]] = []
    total = torch.zeros(())
    for step in range(steps):
        span = slice(1 + step, 1 + step + length)
        embeds = head.embed_tokens(batch.ids[:, span])
        hidden = head(embeds, hidden, positions + step, mask, steps=seen)
        counted = batch.weights[:, span] > 0
        loss = cross_entropy(head.logits(hidden[counted]), labels[:, span][counted])
        total = total + decay**step * loss
    return total / sum(decay**step for step in range(steps))


def split_states(head: Eagle3Head, states: Tensor) -> tuple[Tensor, Tensor]:
    """Split a text's states into the auxiliary ones and the last one."""
    width = head.config.target_hidden_size
    return states[..., :-width], states[..., -width:]


@torch.no_grad()
def draft_chains(head: Eagle3Head, text: Text, *, steps: int) -> Tensor:
    """Draft a chain of `steps` tokens after every token of a text.

    Parameters
    ----------
    head : Eagle3Head
        With the attention function "unrolled".
    text : Text
        Of N tokens.
    steps : int
        Tokens a chain.

    Returns
    -------
    Tensor
        int64 [N - 1, steps]: at p, the tokens drafted after token p + 1.
    """
    length = len(text.ids) - 1
    aux, _ = split_states(head, text.states[None, :length].float())
    hidden, tokens = head.combine_aux(aux), text.ids[None, 1:]
    positions, mask = torch.arange(length)[None], causal_mask(length)
    seen: list[tuple[Tensor, Tensor]] = []
    chain = []
    for step in range(steps):
        hidden = head(head.embed_tokens(tokens), hidden, positions + step, mask, steps=seen)
        tokens = head.to_target_ids(head.logits(hidden).argmax(-1))
        chain.append(tokens[0])
    return torch.stack(chain, dim=-1)


def evaluate(
    head: Eagle3Head, held: Sequence[Text], *, new_tokens: int, steps: int
) -> dict[str, Any]:
    """Simulate greedy speculative decoding.

    The target's greedy text is fixed, so that the drafts at every position of it are those of
    decoding, and decoding is a walk along it: each pass goes on by the drafts accepted plus one.

    Parameters
    ----------
    head : Eagle3Head
        With the attention function "unrolled".
    held : sequence of Text
        The texts, those not ended by an end token of `new_tokens` + `steps` new tokens.
    new_tokens : int
        A pass starts as long as the text has fewer new tokens.
    steps : int
        Tokens drafted a pass.

    Returns
    -------
    dict
        Passes, tokens a pass, and by draft position the share of the passes that accept it.
    """
    counts: list[int] = []
    for text in tqdm(held, desc="evaluate", leave=False):
        chains = draft_chains(head, text, steps=steps)
        # Behind the end of a text nothing is right.
        ids = torch.cat([text.ids, torch.full((steps,), -1)])
        matches = chains == ids[2:].unfold(0, steps, 1)
        accepted = matches.long().cumprod(-1).sum(-1).tolist()
        # The prompt's pass yields the first new token, which is the first to draft after.
        position = text.start - 1
        while position + 2 < min(len(text.ids), text.start + new_tokens + 1):
            counts.append(accepted[position])
            position += accepted[position] + 1
    by_position = [sum(c > k for c in counts) / len(counts) for k in range(steps)]
    return {
        "passes": len(counts),
        "tokens_a_pass": round(1 + sum(counts) / len(counts), 4),
        "acceptance_by_position": [round(share, 4) for share in by_position],
    }


def windows(tokens: Tensor, *, count: int, length: int) -> list[Tensor]:
    """Return `count` windows of `tokens`, evenly spaced, int64 [length] each."""
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return list(tokens[starts[:, None] + torch.arange(length)])


def make_head(target: LlamaForCausalLM, args: argparse.Namespace, draft_ids: Tensor) -> Eagle3Head:
    """Make a head that starts in the basis of the target's own hidden states.

    Embedding, final norm and output matrix are the target's, and `fc` passes on the last of the
    auxiliary states: what the head adds to it is all that it has to learn.
    """
    base = target.config
    layer = LlamaConfig(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=base.head_dim,
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
        rope_parameters=base.rope_parameters,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        tie_word_embeddings=False,
        dtype="float16",
    )
    config = Eagle3Config(
        layer=layer,
        draft_vocab_size=args.draft_vocab_size,
        target_hidden_size=base.hidden_size,
        aux_layer_ids=args.aux_layer_ids,
        norm_before_residual=args.norm_before_residual,
        speculative_tokens=args.draft_tokens,
    )
    head = Eagle3Head(config, attn_implementation="unrolled")
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=layer.initializer_range)
    head.set_draft_vocab(draft_ids)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
        head.fc.weight.mul_(0.25)
        head.fc.weight[:, -base.hidden_size :] = torch.eye(base.hidden_size)
    head.embed_tokens.requires_grad_(args.own_embedding)
    return head


def greedy_texts(
    target: LlamaForCausalLM, prompts: list[Tensor], args: argparse.Namespace, *, new_tokens: int
) -> list[Text]:
    """Return the target's greedy texts after `prompts`, computed once and then kept in a file."""
    key = repr((args.aux_layer_ids, new_tokens, [prompt.tolist() for prompt in prompts]))
    cache = args.work / f"texts-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
    if not cache.is_file():
        texts = text_files.greedy(
            target, prompts, aux_layer_ids=args.aux_layer_ids, new_tokens=new_tokens, batch_size=64
        )
        text_files.save_texts(cache, list(texts))
    return text_files.load_texts(cache)


def austen_texts(
    target: LlamaForCausalLM, args: argparse.Namespace
) -> tuple[list[Text], list[Tensor]]:
    """Return continuations of the novels' training text, and prompts of their held-out text."""
    import novels  # needs a package that reads R data, which nothing else does

    # Every continuation has the same length: the model all but never ends a text by itself.
    target.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.model))
    library = args.novels or args.work / novels.LIBRARY
    train, held = (
        novels.encode(tokenizer, list(part))
        for part in zip(*(novels.load_novel(library, n) for n in novels.NOVELS), strict=True)
    )
    prompts = [] if args.eval_only else windows(train, count=CONTINUATIONS, length=PROMPT)
    texts = greedy_texts(target, prompts, args, new_tokens=NEW_TOKENS)
    return texts, windows(held, count=args.eval_prompts, length=PROMPT)


def smollm2_texts(
    target: LlamaForCausalLM, args: argparse.Namespace
) -> tuple[list[Text], list[Tensor]]:
    """Return the dialogues that the model wrote, and questions that it didn't."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(args.model))
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()[: args.eval_prompts]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )[0]
        for question in questions
    ]
    files = [] if args.eval_only else sorted((args.work / DIALOGUES).glob("*.pt"))
    if not files and not args.eval_only:
        sys.exit(f"{args.work / DIALOGUES}: no dialogues: run tools/dialogues.py first")
    return [text for file in files for text in text_files.load_texts(file)], prompts


TEXTS = {"austen": austen_texts, "smollm2": smollm2_texts}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=BUILT_IN)
    parser.add_argument("--work", type=Path, help="folder of texts and checkpoints (build/MODEL)")
    parser.add_argument("--novels", type=Path, help="folder of the R package janeaustenr (in WORK)")
    parser.add_argument("--eval-only", action="store_true", help="measure the stored head")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--unroll", type=int, help="draft steps to unroll")
    parser.add_argument("--decay", type=float, help="a step's weight by the last's")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--draft-vocab-size", type=int)
    parser.add_argument("--intermediate-size", type=int)
    parser.add_argument(
        "--norm-before-residual", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--eval-prompts", type=int, default=64)
    parser.add_argument("--eval-tokens", type=int, default=128, help="tokens to decode a prompt")
    parser.add_argument("--draft-tokens", type=int, default=4, help="drafts a pass in decoding")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps; also checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    model = parser.parse_known_args()[0].model
    parser.set_defaults(work=ROOT / "build" / model, **SETTINGS[model])
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    folder = resolve(args.model)
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.requires_grad_(False)
    texts, prompts = TEXTS[args.model](target, args)
    # The last pass may start at the last token, and drafts on after it.
    held = greedy_texts(target, prompts, args, new_tokens=args.eval_tokens + args.draft_tokens)

    def report(head: Eagle3Head) -> dict[str, Any]:
        return evaluate(head, held, new_tokens=args.eval_tokens, steps=args.draft_tokens)

    output = PACKAGE / args.model
    if args.eval_only:
        print(json.dumps(report(load_stored(target, output))))
        return

    answers = torch.cat([text.ids[text.start :] for text in texts])
    frequency = answers.bincount(minlength=target.config.vocab_size)
    draft_ids = frequency.topk(args.draft_vocab_size).indices.sort().values
    share = frequency[draft_ids].sum().item() / frequency.sum().item()
    print(f"{len(texts):,} texts, {len(answers):,} tokens of greedy text")
    print(f"the draft vocabulary has {share:.2%} of them")

    head = make_head(target, args, draft_ids)
    print(f"parameters: {sum(p.numel() for p in head.parameters() if p.requires_grad):,}")
    output_rows = target.lm_head.weight[draft_ids]

    # A checkpoint of another head, or of other texts, is of no use for these.
    shape = (args.model, args.aux_layer_ids, args.draft_vocab_size, args.intermediate_size)
    key = repr((shape, args.norm_before_residual, len(answers), answers.sum().item()))

    def loss_at(step: int) -> Tensor:
        batch = text_files.batch_at(texts, step, size=args.batch_size, seed=args.seed)
        return unrolled_loss(head, batch, output_rows, decay=args.decay, steps=args.unroll)

    log = train(
        head,
        loss_at,
        lambda: {"tokens_a_pass": report(head)["tokens_a_pass"]},
        steps=args.steps,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        evaluate_every=args.evaluate_every,
        checkpoint=args.work / f"draft-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt",
    )

    # The stored weights are 16-bit; the figures reported are theirs, computed in 32-bit.
    for parameter in head.parameters():
        parameter.data = parameter.data.half()
    head.save_pretrained(output / "draft", embed_tokens=args.own_embedding)
    (output / "training_log_draft.csv").write_text(log.read_text())
    print(json.dumps(report(load_stored(target, output))))


def load_stored(target: LlamaForCausalLM, folder: Path) -> Eagle3Head:
    """Load the head that is stored beside a model, in 32-bit."""
    return Eagle3Head.from_pretrained(
        folder / "draft",
        dtype=torch.float32,
        embed_tokens=target.model.embed_tokens.weight,
        attn_implementation="unrolled",
    )


if __name__ == "__main__":
    main()
