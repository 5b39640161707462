"""What a page shows without scripts, and its texts."""

import re

from flwr_hetero.report.compare import compare, read_runs
from flwr_hetero.report.compare.page import comparison_data
from flwr_hetero.report.page import render, run_data


def test_page_without_scripts_has_tables(make_run, rising):
    name = "<b>evil"
    runs = [
        make_run(policy, rising(round_s), {"settings": {"policy": f"{name}{policy}", "seed": 0}})
        for policy, round_s in (("slow", 10.0), ("fast", 1.0))
    ]
    data = comparison_data(compare(read_runs(runs)))
    page = re.sub(r"<script.*?</script>", "", render(data), flags=re.DOTALL)
    assert "<b>" not in page
    assert ">1 min 30 s</td>" in page
    assert data["notes"][0] in page
    data = run_data(make_run("one", rising(1.0, selected=[name])))
    page = re.sub(r"<script.*?</script>", "", render(data), flags=re.DOTALL)
    assert page.count('class="value"') == len(data["facts"])
    assert "<td>&lt;b&gt;evil</td>" in page


def test_run_is_judged_by_its_own_target(make_run, rising):
    settings = {"settings": {"target-accuracy": 0.5}}
    why = "accuracy 0.9 has reached target-accuracy 0.5"
    data = run_data(make_run("own", rising(10.0, stopped=why), settings))
    text = f"It reached 50.0 % after 50 s, in round 5 of 20. The run ended early: {why}."
    assert data["sentences"][0].partition("\n")[0] == f"Final accuracy: 90.0 %. {text}"
    assert [metric["target"] for metric in data["curves"]["metrics"]] == [0.5]
    loss = run_data(make_run("loss", rising(metric="loss"), settings))
    assert loss["curves"]["metrics"][0]["target"] != 0.5
