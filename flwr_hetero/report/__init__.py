"""What a run leaves behind: history, plots, one self-contained HTML page.

Reading and writing a run directory needs NumPy only; the report itself needs the extra
``flwr-hetero[report]`` on the machine that draws it.
"""

from flwr_hetero.report.history import History, read_history, time_to_target
from flwr_hetero.report.run_dir import RunDirectory

__all__ = ["History", "RunDirectory", "read_history", "time_to_target"]
