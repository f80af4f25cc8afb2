"""Plots as data: the page draws them as inline SVG with a title, a description, and a table of the same numbers."""

from __future__ import annotations

from reports.plots.bars import plot_distances, plot_ratios
from reports.plots.drawing import Plot
from reports.plots.layers import plot_models
from reports.plots.points import plot_errors, plot_strips
from reports.results import Results


def make_plots(results: Results) -> tuple[Plot, ...]:
    """Make the plots for which a run has data."""
    checks = [check for check in results.checks if check.statistics]
    of_run = (plot_strips(results.claims), plot_distances(checks), plot_ratios(checks), plot_errors(checks))
    return (*(plot for plot in of_run if plot is not None), *plot_models(results.models))
