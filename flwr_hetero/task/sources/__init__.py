"""Where examples come from: data sets that need no download, Parquet files, the Hub."""

from flwr_hetero.task.sources.source import Source, Split, measure, open_source

__all__ = ["Source", "Split", "measure", "open_source"]
