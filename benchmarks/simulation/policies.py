"""The policies that are compared. `SHIPPED` is that of deploy/k8s/components/autoscaling."""

from benchmarks.simulation.autoscaler import Policy, Rule, Trigger
from benchmarks.simulation.cluster import FleetPlan, Plan

BACKLOG = Trigger("encoder_backlog_seconds", "avg", 0.25, 60)
ENCODER_BUSY = Trigger("encoder_busy_seconds_total", "rate", 0.6, 120)
ROWS = Trigger("decoder_sequences_running", "sum", 24)
WAITING = Trigger("decoder_sequences_waiting_engine", "sum", 4)
KV = Trigger("decoder_kv_usage_ratio", "sum", 0.75)

UP = Rule(stabilization_s=0, pods=4, period_s=60)
DOWN = Rule(stabilization_s=300, pods=1, period_s=120)
ENCODER = Policy((BACKLOG, ENCODER_BUSY), UP, DOWN)
DECODER = Policy((ROWS, WAITING, KV), UP, DOWN)
REPLICA = Policy((BACKLOG, ROWS, WAITING, KV), UP, DOWN)


def split(encoders: int = 1, decoders: int = 1, *, encoder: Policy | None = ENCODER,
          decoder: Policy | None = DECODER, start_s: float = 60.0) -> Plan:  # fmt: skip
    """Encoders and decoders that scale apart."""
    return Plan(
        (
            FleetPlan(("encoder",), encoders, encoder, start_s),
            FleetPlan(("decoder",), decoders, decoder, start_s),
        )
    )


def replicas(number: int = 1, policy: Policy | None = REPLICA, start_s: float = 60.0) -> Plan:
    """Pods that hold both stages on one GPU."""
    return Plan((FleetPlan(("encoder", "decoder"), number, policy, start_s),))
