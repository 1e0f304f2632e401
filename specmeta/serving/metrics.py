"""What the server has done, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from specmeta.serving.engine_thread import EngineThread

__all__ = ["make_registry"]


def make_registry(thread: EngineThread) -> CollectorRegistry:
    """Return a registry that shows what `thread` counts at the moment of a scrape."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(thread))
    return registry


class _EngineCollector(Collector):
    """Reads the counts that the engine keeps anyway, rather than keep them twice."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        thread, stats = self._thread, self._thread.stats
        yield _by_label(
            CounterMetricFamily(
                "specmeta_requests",
                "Texts by how they ended; refused: requests with an error instead.",
                labels=["outcome"],
            ),
            thread.outcomes,
        )
        yield GaugeMetricFamily("specmeta_requests_running", "Texts in a slot.", stats.running)
        yield GaugeMetricFamily("specmeta_requests_waiting", "Texts without one.", stats.waiting)
        yield CounterMetricFamily(
            "specmeta_prompt_tokens", "Tokens of prompts let in.", thread.prompt_tokens
        )
        yield CounterMetricFamily("specmeta_tokens", "Tokens of texts.", stats.tokens)
        yield CounterMetricFamily("specmeta_steps", "Steps of the engine.", stats.steps)
        yield CounterMetricFamily(
            "specmeta_target_passes", "Rows that the target has verified.", stats.target_passes
        )
        for name, text, counts in (
            ("specmeta_drafted_tokens", "Drafts verified, by position.", stats.drafted),
            ("specmeta_accepted_tokens", "Drafts that stood, by position.", stats.accepted),
        ):
            yield _by_label(
                CounterMetricFamily(name, text, labels=["position"]),
                {str(position): count for position, count in enumerate(counts)},
            )
        yield GaugeMetricFamily(
            "specmeta_acceptance_ratio",
            "Share of the drafts that stood, since the start.",
            sum(stats.accepted) / max(sum(stats.drafted), 1),
        )
        yield GaugeMetricFamily(
            "specmeta_tokens_per_pass",
            "Mean number of tokens that come out of a target pass, since the start.",
            stats.tokens_per_pass,
        )
        for name, text, pages in (
            ("specmeta_pages_in_use", "Pages that requests hold.", stats.pages_in_use),
            ("specmeta_pages", "Pages in all.", stats.pages_total),
        ):
            yield _by_label(
                GaugeMetricFamily(name, text, labels=["pool"]),
                dict(zip(("target", "draft"), pages, strict=False)),
            )
        yield CounterMetricFamily(
            "specmeta_preemptions", "Texts put back for want of pages.", stats.preemptions
        )


def _by_label(
    family: CounterMetricFamily | GaugeMetricFamily, values: dict[str, int]
) -> CounterMetricFamily | GaugeMetricFamily:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
