"""Train the EAGLE-3 draft head of ``austen`` on the frozen target, then measure it.

Prerequisites: those of ``train_target.py``, and its output. Then ``python tools/train_draft.py``.
A run that was stopped goes on from its last checkpoint, unless the target or the continuations
asked for have changed. ``--eval-only`` measures the stored head.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import novels
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from train_target import (
    LIBRARY,
    OUTPUT,
    ROOT,
    WORK,
    append_log,
    encode,
    learning_rate,
    load_checkpoint,
    make_optimizer,
    save_checkpoint,
)
from transformers import AttentionInterface, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(ROOT))

from specmeta.models.eagle3 import Eagle3Config, Eagle3Head

AUX_LAYER_IDS = (1, 2, 3)


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


@torch.no_grad()
def read_target(target: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's auxiliary hidden states [B, N, 3 * hidden] and logits [B, N, vocab]."""
    output = target(ids, output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[i] for i in AUX_LAYER_IDS], dim=-1), output.logits


def unrolled_loss(
    head: Eagle3Head, ids: Tensor, aux: Tensor, target_logits: Tensor, *, steps: int, decay: float
) -> Tensor:
    """Return the loss of training-time test: the head's draft steps, unrolled.

    Step k at position p reads token p + 1 + k and predicts token p + 2 + k, for which the
    target's own distribution is that of its position p + 1 + k.

    Parameters
    ----------
    head : Eagle3Head
        With the attention function "unrolled".
    ids : Tensor
        int64 [B, N].
    aux, target_logits : Tensor
        Out of `read_target`.
    steps : int
        Draft steps to unroll.
    decay : float
        Weight of a step's loss relative to that of the step before.

    Returns
    -------
    Tensor
        A scalar.
    """
    length = ids.shape[1] - steps
    drafted = head.to_target_ids(torch.arange(head.config.draft_vocab_size))
    hidden = head.combine_aux(aux[:, :length])
    positions, mask = torch.arange(length)[None], causal_mask(length)
    seen: list[tuple[Tensor, Tensor]] = []
    total = torch.zeros(())
    for step in range(steps):
        span = slice(1 + step, 1 + step + length)
        embeds = head.embed_tokens(ids[:, span])
        hidden = head(embeds, hidden, positions + step, mask, steps=seen)
        labels = target_logits[:, span, drafted].softmax(-1)
        loss = cross_entropy(head.logits(hidden).flatten(0, 1), labels.flatten(0, 1))
        total = total + decay**step * loss
    return total / sum(decay**step for step in range(steps))


@torch.no_grad()
def draft_chains(head: Eagle3Head, ids: Tensor, aux: Tensor, *, steps: int) -> Tensor:
    """Draft a chain of `steps` tokens after every token of a sequence.

    Parameters
    ----------
    head : Eagle3Head
        With the attention function "unrolled".
    ids : Tensor
        int64 [B, N].
    aux : Tensor
        Out of `read_target`.
    steps : int
        Tokens a chain.

    Returns
    -------
    Tensor
        int64 [B, N - 1, steps]: at p, the tokens drafted after token p + 1.
    """
    length = ids.shape[1] - 1
    hidden, tokens = head.combine_aux(aux[:, :length]), ids[:, 1:]
    positions, mask = torch.arange(length)[None], causal_mask(length)
    seen: list[tuple[Tensor, Tensor]] = []
    chain = []
    for step in range(steps):
        hidden = head(head.embed_tokens(tokens), hidden, positions + step, mask, steps=seen)
        tokens = head.to_target_ids(head.logits(hidden).argmax(-1))
        chain.append(tokens)
    return torch.stack(chain, dim=-1)


def evaluate(
    target: LlamaForCausalLM, head: Eagle3Head, ids: Tensor, *, prompt: int, steps: int
) -> dict[str, Any]:
    """Simulate greedy speculative decoding.

    The target's greedy text is fixed, so that the drafts at every position of it are those of
    decoding, and decoding is a walk along it: each pass goes on by the drafts accepted plus one.

    Parameters
    ----------
    target, head
        The models.
    ids : Tensor
        int64 [B, N]: prompts and the target's greedy continuations. Passes start as long as
        their drafts end within N tokens.
    prompt : int
        Tokens of a prompt.
    steps : int
        Tokens drafted a pass.

    Returns
    -------
    dict
        Passes, tokens a pass, and by draft position the share of the passes that accept it.
    """
    head.config.layer._attn_implementation = "unrolled"
    counts: list[int] = []
    for rows in tqdm(ids.split(16), desc="evaluate", leave=False):
        aux, _ = read_target(target, rows)
        chains = draft_chains(head, rows, aux, steps=steps)
        width = rows.shape[1] - 1 - steps
        actual = rows[:, 2:].unfold(1, steps, 1)
        accepted = (chains[:, :width] == actual).long().cumprod(-1).sum(-1).tolist()
        for row in accepted:
            # The prompt's pass yields the first new token, which is the first to draft after.
            position = prompt - 1
            while position < width:
                counts.append(row[position])
                position += row[position] + 1
    by_position = [sum(c > k for c in counts) / len(counts) for k in range(steps)]
    return {
        "passes": len(counts),
        "tokens_a_pass": round(1 + sum(counts) / len(counts), 4),
        "acceptance_by_position": [round(share, 4) for share in by_position],
    }


@torch.no_grad()
def greedy(
    target: LlamaForCausalLM, prompts: Tensor, *, new_tokens: int, batch_size: int
) -> Tensor:
    """Return prompts, int64 [B, P], followed by the target's greedy text, [B, P + new_tokens]."""
    batches = tqdm(prompts.split(batch_size), desc="greedy continuations")
    return torch.cat(
        [target.generate(rows, max_new_tokens=new_tokens, do_sample=False) for rows in batches]
    )


def windows(tokens: Tensor, *, count: int, length: int) -> Tensor:
    """Return `count` windows of `tokens`, evenly spaced, int64 [count, length]."""
    starts = torch.linspace(0, len(tokens) - length, count).long()
    return tokens[starts[:, None] + torch.arange(length)]


def batch_at(rows: Tensor, step: int, *, size: int, seed: int) -> Tensor:
    """Return training step `step`'s rows, which depend on `seed` and `step` alone."""
    epoch, index = divmod(step, len(rows) // size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(rows), generator=generator)
    return rows[order[index * size : (index + 1) * size]]


def make_head(target: LlamaForCausalLM, args: argparse.Namespace, draft_ids: Tensor) -> Eagle3Head:
    """Make a head that starts from the target's embedding, final norm and output matrix."""
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
        aux_layer_ids=AUX_LAYER_IDS,
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
    return head


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, default=OUTPUT, help="folder of the target")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoints")
    parser.add_argument("--novels", type=Path, help=f"R package folder (WORK/{LIBRARY})")
    parser.add_argument("--eval-only", action="store_true", help="measure the stored head")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--unroll", type=int, default=4, help="draft steps to unroll")
    parser.add_argument("--decay", type=float, default=0.9, help="a step's weight by the last's")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--draft-vocab-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument(
        "--norm-before-residual", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument("--continuations", type=int, default=2048, help="greedy texts to train on")
    parser.add_argument("--prompt", type=int, default=48, help="tokens a prompt")
    parser.add_argument("--new-tokens", type=int, default=152, help="tokens a continuation")
    parser.add_argument("--eval-prompts", type=int, default=64)
    parser.add_argument("--eval-tokens", type=int, default=128, help="tokens to decode a prompt")
    parser.add_argument("--draft-tokens", type=int, default=4, help="drafts a pass in decoding")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps; also checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    # Every continuation has the same length, so that they make one tensor.
    target.generation_config.eos_token_id = None
    target.requires_grad_(False)
    library = args.novels or args.work / LIBRARY
    train_texts, held_texts = zip(
        *(novels.load_novel(library, n) for n in novels.NOVELS), strict=True
    )

    held = encode(tokenizer, list(held_texts))
    eval_ids = greedy(
        target,
        windows(held, count=args.eval_prompts, length=args.prompt),
        # The last pass may start at the last token, and drafts on after it.
        new_tokens=args.eval_tokens + args.draft_tokens,
        batch_size=args.eval_prompts,
    )

    def report(head: Eagle3Head) -> dict[str, Any]:
        return evaluate(target, head, eval_ids, prompt=args.prompt, steps=args.draft_tokens)

    folder = args.target / "draft"
    if args.eval_only:
        print(json.dumps(report(Eagle3Head.from_pretrained(folder, dtype=torch.float32))))
        return

    tokens = encode(tokenizer, list(train_texts))
    # What was kept for another target, or for other continuations, is of no use for these.
    key = hashlib.sha256((args.target / "model.safetensors").read_bytes())
    key.update(repr((args.continuations, args.prompt, args.new_tokens)).encode())
    work = args.work / f"draft-{key.hexdigest()[:12]}"
    work.mkdir(parents=True, exist_ok=True)
    cache = work / "continuations.pt"
    if cache.is_file():
        rows = torch.load(cache, weights_only=True)
    else:
        prompts = windows(tokens, count=args.continuations, length=args.prompt)
        rows = greedy(target, prompts, new_tokens=args.new_tokens, batch_size=128)
        torch.save(rows, cache)
    frequency = rows[:, args.prompt :].flatten().bincount(minlength=target.config.vocab_size)
    draft_ids = frequency.topk(args.draft_vocab_size).indices.sort().values
    share = frequency[draft_ids].sum().item() / frequency.sum().item()
    print(f"the draft vocabulary has {share:.2%} of the tokens of the continuations")

    head = make_head(target, args, draft_ids)
    print(f"parameters: {sum(p.numel() for p in head.parameters()):,}")

    optimizer = make_optimizer(head, weight_decay=args.weight_decay)
    checkpoint, log = work / "checkpoint.pt", work / "log.csv"
    first = load_checkpoint(checkpoint, model=head, optimizer=optimizer)
    running, start = 0.0, time.monotonic()
    progress = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=5)
    for step in progress:
        rate = learning_rate(step, steps=args.steps, peak=args.learning_rate, warmup=args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = batch_at(rows, step, size=args.batch_size, seed=args.seed)
        aux, logits = read_target(target, ids)
        loss = unrolled_loss(head, ids, aux, logits, steps=args.unroll, decay=args.decay)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        done = step + 1
        if done % args.evaluate_every == 0 or done == args.steps:
            since = (step % args.evaluate_every) + 1
            value = report(head)["tokens_a_pass"]
            append_log(
                log,
                {
                    "step": done,
                    "learning_rate": round(rate, 7),
                    "train_loss": round(running / since, 4),
                    "tokens_a_pass": value,
                    "seconds": round(time.monotonic() - start),
                },
            )
            progress.set_postfix(train=f"{running / since:.3f}", tokens_a_pass=f"{value:.3f}")
            running = 0.0
            save_checkpoint(checkpoint, model=head, optimizer=optimizer, step=done)

    # The stored weights are 16-bit; the figures reported are theirs, computed in 32-bit.
    for parameter in head.parameters():
        parameter.data = parameter.data.half()
    head.save_pretrained(folder)
    (args.target / "training_log_draft.csv").write_text(log.read_text())
    print(json.dumps(report(Eagle3Head.from_pretrained(folder, dtype=torch.float32))))


if __name__ == "__main__":
    main()
