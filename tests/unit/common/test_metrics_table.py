"""Names of metrics."""

import re

from scripts import metrics_table


def test_names_begin_with_the_service_and_counters_end_in_total():
    for service, registry in metrics_table.registries().items():
        found = list(metrics_table.rows(registry))
        assert len(found) > 5
        for name, kind, _, meaning in found:
            own = rf"triptych_{service}_|triptych_build_info$|process_|vllm:"
            assert re.match(own, name) and re.fullmatch(r"[a-z0-9_:]+", name), name
            assert name.endswith("_total") == (kind == "counter"), name
            assert len(meaning) > 10, name
