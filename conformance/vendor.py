"""What a vendor's own code calls: ``register`` makes a pattern with the vendor's own ops buildable."""

from conformance.claims.registry import register
from conformance.ops.op_model import Input, Role

__all__ = ["Input", "Role", "register"]
