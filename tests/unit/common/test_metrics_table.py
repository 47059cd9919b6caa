"""docs/metrics.md is what the services export."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def load_script():
    spec = importlib.util.spec_from_file_location("table", ROOT / "scripts" / "metrics_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_the_services_export():
    script = load_script()
    assert script.TABLE.read_text() == script.document(), "run scripts/metrics_table.py"


def test_names_begin_with_the_service_and_counters_end_in_total():
    script = load_script()
    for service, registry in script.registries().items():
        found = list(script.rows(registry))
        assert len(found) > 5
        for name, kind, _, meaning in found:
            assert re.fullmatch(rf"({service}_|vllm:)[a-z_]+", name), name
            assert name.endswith("_total") == (kind == "counter"), name
            assert len(meaning) > 10, name
