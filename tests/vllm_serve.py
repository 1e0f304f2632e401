"""Runs vLLM on the CPU, offline: reads a job from standard input, writes what came of it to a file.

It runs in vLLM's own environment.
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

# The engine's own kernels on the CPU, and what the plugin runs in their place.
OPERATORS = {
    "_C::compute_slot_mapping_kernel_impl": "slots",
    "_C::eagle_prepare_next_token_padded_kernel_impl": "next_token",
    "_C::eagle_prepare_inputs_padded_kernel_impl": "inputs",
    "_C::eagle_step_slot_mapping_metadata_kernel_impl": "step",
    "specmeta::map_slots": "slots",
    "specmeta::count_sampled": "next_token",
    "specmeta::locate_sampled": "inputs",
    "specmeta::draft_step": "step",
}


class Counter:
    """What a worker does beside its work: it counts the calls of operators by torch's profiler."""

    def start_counting(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.call_profiler = profile(activities=[ProfilerActivity.CPU])
        self.call_profiler.start()

    def stop_counting(self) -> dict[str, dict[str, int]]:
        """Return how often each was called, by library."""
        self.call_profiler.stop()
        calls: dict[str, dict[str, int]] = {}
        for average in self.call_profiler.key_averages():
            if average.key in OPERATORS:
                library, _ = average.key.split("::")
                calls.setdefault(library, {})[OPERATORS[average.key]] = average.count
        return calls


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    engine = LLM(
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        worker_extension_cls=f"{Path(__file__).stem}.{Counter.__name__}",
        **job["engine"],
    )
    engine.collective_rpc("start_counting")
    texts = engine.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]],
        SamplingParams(temperature=0, max_tokens=job["max_new_tokens"]),
        use_tqdm=False,
    )
    calls = engine.collective_rpc("stop_counting")
    prefix = "vllm:spec_decode_num_"
    metrics = {
        metric.name.removeprefix(prefix): metric.values
        if hasattr(metric, "values")
        else metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(prefix)
    }
    result = {
        "token_ids": [list(text.outputs[0].token_ids) for text in texts],
        "passes": metrics.get("drafts", 0),
        "drafted": metrics.get("draft_tokens", 0),
        "accepted": metrics.get("accepted_tokens_per_pos", []),
        "calls": calls,
    }
    Path(sys.argv[1]).write_text(json.dumps(result))


# The workers of a tensor-parallel engine import this file again.
if __name__ == "__main__":
    main()
