"""What a run leaves behind: a history, and one self-contained HTML page.

Reading a run directory needs NumPy only; recording a run needs the extra ``report``.
"""

from flwr_hetero.report.history import History, read_history
from flwr_hetero.report.run_dir import RunDirectory

__all__ = ["History", "RunDirectory", "read_history"]
