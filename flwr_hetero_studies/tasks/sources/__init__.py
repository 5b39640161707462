"""Where examples come from: data sets that need no download, Parquet files, the Hub."""

from flwr_hetero_studies.tasks.sources.source import (
    DataSource,
    Split,
    check_dataset,
    measure,
    open_source,
)

__all__ = ["DataSource", "Split", "check_dataset", "measure", "open_source"]
