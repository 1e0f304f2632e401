"""Train ``austen``, the small Llama that the tests and the examples decode with.

Prerequisites: ``pip install torch transformers tokenizers safetensors rdata tqdm``, a C++
compiler for ``torch.compile`` (or ``--no-compile``), and the novels::

    mkdir -p build/austen
    (cd build/austen && apt-get download r-cran-janeaustenr)
    dpkg-deb -x build/austen/r-cran-janeaustenr_*.deb build/austen/deb

Then ``python tools/train_target.py``. A run that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import novels
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from training import train
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END_OF_TEXT = "<|endoftext|>"
ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "specmeta" / "models" / "austen"
WORK = ROOT / "build" / "austen"


def train_tokenizer(texts: list[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def batch_at(
    tokens: torch.Tensor, step: int, *, size: int, context: int, seed: int
) -> torch.Tensor:
    """Return training step `step`'s crops, [size, context + 1] int64.

    Every epoch shuffles the windows of `tokens` anew, shifted by a random offset. The crops
    depend on `seed` and `step` alone, so a resumed run needs no state of a random generator.
    """
    windows = len(tokens) // context - 2
    per_epoch = windows // size
    epoch, index = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    offset = torch.randint(context, (1,), generator=generator)
    order = torch.randperm(windows, generator=generator)[index * size : (index + 1) * size]
    starts = offset + order * context
    return tokens[starts[:, None] + torch.arange(context + 1)]


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor, *, context: int) -> float:
    """Return the mean cross-entropy, in nats a token, over windows that don't overlap."""
    count = (len(tokens) - 1) // context
    inputs = tokens[: count * context].view(count, context)
    labels = tokens[1 : count * context + 1].view(count, context)
    total = 0.0
    for x, y in zip(inputs.split(16), labels.split(16), strict=True):
        logits = model(x, use_cache=False).logits.float()
        total += cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    return total / labels.numel()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the model")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoints")
    parser.add_argument("--novels", type=Path, help=f"R package folder (WORK/{novels.LIBRARY})")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps; also checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)

    library = args.novels or args.work / novels.LIBRARY
    train_texts, held_texts = zip(
        *(novels.load_novel(library, n) for n in novels.NOVELS), strict=True
    )
    tokenizer = train_tokenizer(list(train_texts), vocab_size=args.vocab_size)
    tokenizer.save_pretrained(args.output)
    tokens, held = (novels.encode(tokenizer, list(part)) for part in (train_texts, held_texts))
    end = tokenizer.eos_token_id

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab_size,
            hidden_size=256,
            intermediate_size=args.intermediate_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=None,
        )
    )
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    print(f"parameters: {model.num_parameters():,}")
    print(f"tokens: {len(tokens):,} to train on, {len(held):,} held out")

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    training_loss = torch.compile(loss_of) if args.compile else loss_of
    log = train(
        model,
        lambda step: training_loss(
            batch_at(tokens, step, size=args.batch_size, context=args.context, seed=args.seed)
        ),
        lambda: {"held_out_loss": round(held_out_loss(model, held, context=args.context), 4)},
        steps=args.steps,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        evaluate_every=args.evaluate_every,
        checkpoint=args.work / "target.pt",
    )

    # The stored weights are 16-bit; the figure reported is theirs, computed in 32-bit.
    model.half().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    (args.output / "training_log_target.csv").write_text(log.read_text())
    stored = LlamaForCausalLM.from_pretrained(args.output, dtype=torch.float32)
    value = held_out_loss(stored, held, context=args.context)
    print(f"held-out loss of the stored weights: {value:.4f}")


if __name__ == "__main__":
    main()
