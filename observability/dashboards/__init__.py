"""Grafana dashboards: the `*_board.py` say what they show, `build.py` writes the JSON that Grafana reads."""
