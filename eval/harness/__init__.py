"""The evaluation of any benchmark: plan, workers, log, statistics, report. Knows no simulator by name."""
