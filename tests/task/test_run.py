import pytest
from toy import toy_app

from flwr_hetero.client.device import DeviceProfile
from flwr_hetero.fleet import LocalGrid
from flwr_hetero.strategy import Wrapper
from flwr_hetero.task.run import run_app
from flwr_hetero.task.settings import Settings


@pytest.mark.parametrize("name", ["mistyped", "empty"])
def test_resume_without_a_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    out = str(tmp_path / name)
    settings = Settings(output_dir=out, resume=True, num_server_rounds=1, model="softmax")
    grid = LocalGrid(toy_app(), profiles=[DeviceProfile()])
    with pytest.raises(ValueError, match="output-dir must hold a checkpoint to resume") as caught:
        run_app("toy", settings, Wrapper(), grid)
    assert "correct the path" in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
