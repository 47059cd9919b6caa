"""The fused operations, gathered. Imported only where Triton is."""

from services.decoder.kernels import add_norm, qk_rope_cache, silu_mul


class TritonOps:
    """See `ops.Ops`."""

    rms_norm = staticmethod(add_norm.rms_norm)
    add_rms_norm = staticmethod(add_norm.add_rms_norm)
    silu_and_mul = staticmethod(silu_mul.silu_and_mul)
    qk_rope_cache = staticmethod(qk_rope_cache.qk_rope_cache)
