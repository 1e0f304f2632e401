"""The training loop of both tools: AdamW, warm-up and cosine, checkpoints, a log."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm


def train(
    model: torch.nn.Module,
    loss_at: Callable[[int], Tensor],
    evaluate: Callable[[], dict[str, float]],
    *,
    steps: int,
    learning_rate: float,
    warmup: int,
    weight_decay: float,
    evaluate_every: int,
    checkpoint: Path,
) -> Path:
    """Train a model, going on from its checkpoint where there is one.

    Parameters
    ----------
    model : Module
        Those of its parameters are trained that require a gradient.
    loss_at : callable
        The loss of a step.
    evaluate : callable
        What the log is to say beside the loss.
    steps, learning_rate, warmup, weight_decay
        The schedule: the peak learning rate, reached after `warmup` steps, and AdamW's decay.
    evaluate_every : int
        Steps between two lines of the log, and between two checkpoints.
    checkpoint : Path
        The checkpoint's file; the log stands beside it.

    Returns
    -------
    Path
        The log, in CSV.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    log = checkpoint.with_suffix(".csv")
    optimizer = _make_optimizer(model, weight_decay=weight_decay)
    first = _load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    running, start = 0.0, time.monotonic()
    progress = tqdm(range(first, steps), initial=first, total=steps, mininterval=5)
    for step in progress:
        rate = _rate_at(step, steps=steps, peak=learning_rate, warmup=warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_at(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        done = step + 1
        if done % evaluate_every == 0 or done == steps:
            line = {
                "step": done,
                "learning_rate": round(rate, 7),
                "train_loss": round(running / (step % evaluate_every + 1), 4),
                **evaluate(),
                "seconds": round(time.monotonic() - start),
            }
            _append(log, line)
            progress.set_postfix(line)
            running = 0.0
            _save_checkpoint(checkpoint, model=model, optimizer=optimizer, step=done)
    return log


def _rate_at(step: int, *, steps: int, peak: float, warmup: int) -> float:
    """Return the learning rate of a linear warm-up followed by a cosine that ends at zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def _make_optimizer(model: torch.nn.Module, *, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW that decays the matrices alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def _save_checkpoint(
    path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write a checkpoint such that a run stopped half-way through leaves the earlier one."""
    partial = path.with_suffix(".partial")
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, partial)
    os.replace(partial, path)


def _load_checkpoint(
    path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Restore a checkpoint where there is one and return the step to go on with."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _append(path: Path, row: dict[str, float]) -> None:
    """Append one row to a CSV file, with a header where the file is new."""
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
