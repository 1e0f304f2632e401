"""Runs vLLM on the CPU, offline: reads a job from standard input, writes what came of it to a file.

It runs in vLLM's own environment, which has no pytest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine = LLM(
        **job["engine"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        disable_log_stats=False,
    )
    texts = engine.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]],
        SamplingParams(temperature=0, max_tokens=job["max_new_tokens"]),
        use_tqdm=False,
    )
    prefix = "vllm:spec_decode_num_"
    metrics = {
        metric.name.removeprefix(prefix): getattr(metric, "value", None) or metric.values
        for metric in engine.get_metrics()
        if metric.name.startswith(prefix)
    }
    result = {
        "token_ids": [list(text.outputs[0].token_ids) for text in texts],
        "passes": metrics.get("drafts", 0),
        "drafted": metrics.get("draft_tokens", 0),
        "accepted": metrics.get("accepted_tokens_per_pos", []),
    }
    Path(sys.argv[1]).write_text(json.dumps(result))


# The workers of a tensor-parallel engine import this file again.
if __name__ == "__main__":
    main()
