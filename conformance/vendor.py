"""What a vendor's own code uses: ``register`` makes a pattern with the vendor's own ops buildable.

``GivenModel`` is what a function that ``--model`` names returns.
"""

from conformance.claims.registry import register
from conformance.ops.op_model import Input, Role
from conformance.own_models.given import GivenModel

__all__ = ["GivenModel", "Input", "Role", "register"]
