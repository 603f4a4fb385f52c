"""Write the dashboards as JSON with Grafana's foundation SDK: `python -m observability.dashboards.build [--check]`.

The SDK is a development dependency. The JSON is committed, since Grafana's provisioning reads files.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common as build_common
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

from observability.dashboards.billing_board import BILLING
from observability.dashboards.fleet_board import FLEET
from observability.dashboards.latency_board import LATENCY
from observability.dashboards.panel import Board, Panel
from observability.dashboards.pd_board import PD
from observability.dashboards.slo_board import SLO

BOARDS: Final = (SLO, PD, LATENCY, FLEET, BILLING)
FOLDER: Final = Path(__file__).parent / "json"
SOURCE: Final = dashboard.DataSourceRef(type_val="prometheus", uid="${source}")
_WIDTH, _HEIGHT = 6, 8
_COLOURS: Final = ("green", "yellow", "red")


def _thresholds(panel: Panel) -> build.ThresholdsConfig:
    limits = [limit for limit in (panel.warn, panel.alarm) if limit is not None]
    colours = list(_COLOURS[: len(limits) + 1])
    if panel.low_is_bad:
        limits.reverse()
        colours.reverse()
    steps = [dashboard.Threshold(value=None, color=colours[0])]
    steps += [dashboard.Threshold(value=limit, color=colour) for limit, colour in zip(limits, colours[1:], strict=True)]
    return build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def _panel(panel: Panel) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .title(panel.title)
        .description(f"{panel.description} Healthy: {panel.healthy}.")
        .unit(panel.unit)
        .datasource(SOURCE)
        .span(_WIDTH)
        .height(_HEIGHT)
        .thresholds(_thresholds(panel))
        .axis_soft_min(0)
        .fill_opacity(20 if panel.stacked else 5)
    )
    if panel.warn is not None or panel.alarm is not None:
        drawn.thresholds_style(build_common.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED))
    if panel.stacked:
        drawn.stacking(build_common.StackingConfig().mode(common.StackingMode.NORMAL))
    for query in panel.queries:
        drawn.with_target(prometheus.Dataquery().expr(query.expr).legend_format(query.legend).exemplar(exemplar=True))
    return drawn


def _variable(name: str, label: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def drawn(board: Board) -> str:
    """Return the JSON of one dashboard."""
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["pdgate"])
        .editable()
        .timezone("browser")
        .refresh("15s")
        .time("now-1h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("source").label("Data source").type("prometheus"))
        .with_variable(_variable("model", "Model", "label_values(pdgate_request_slo_total, model)"))
        .with_variable(_variable("pool", "Pool", "label_values(pdgate_leader, pool)"))
        .with_variable(build.TextBoxVariable("request").label("Request id"))
        .with_variable(build.TextBoxVariable("portal").label("Portal").default_value("http://127.0.0.1:8080/portal"))
        .link(
            build.DashboardLink("This request in the portal")
            .type(dashboard.DashboardLinkType.LINK)
            .icon("external link")
            .url("${portal}/operator/requests/${request}")
            .target_blank(target_blank=True)
        )
        .link(
            build.DashboardLink("pdgate")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .icon("apps")
            .tags(["pdgate"])
            .as_dropdown(as_dropdown=True)
            .keep_time(keep_time=True)
            .include_vars(include_vars=True)
        )
        .annotation(
            build.AnnotationQuery()
            .name("Flips")
            .datasource(SOURCE)
            .enable(enable=True)
            .icon_color("purple")
            .expr("sum by (direction, reason) (increase(pdgate_flips_total[1m])) > 0")
        )
    )
    ids = itertools.count(1)
    for title, panels in board.rows:
        made.with_row(build.Row(title).id(next(ids)))
        for panel in panels:
            made.with_panel(_panel(panel).id(next(ids)))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write the files, or with `--check` say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for board in BOARDS:
        file, text = FOLDER / f"{board.uid}.json", drawn(board)
        if not file.exists() or file.read_text() != text:
            stale.append(file.name)
            if not check:
                file.write_text(text)
    if check and stale:
        sys.exit(f"dashboards out of date: {', '.join(stale)}. Run make dashboards.")


if __name__ == "__main__":
    main()
