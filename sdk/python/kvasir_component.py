"""The component's entry: gives `Policy` of policy.py to the host. Built by build.sh, not for import in tests."""

import kvasir
import policy
from componentize_py_types import Err

_CONTROL, *_OTHERS = kvasir.host(policy.Policy())


def _class(target, wrap):
    """A class whose methods are those of `target`; componentize-py makes an instance of its own."""
    names = (n for n in dir(target) if not n.startswith("_") and callable(getattr(target, n)))
    return type(type(target).__name__, (), {n: wrap(getattr(target, n)) for n in names})


def _plain(function):
    return lambda self, *args: function(*args)


def _refusing(function):
    def call(self, *args):
        try:
            return function(*args)
        except kvasir.Refused as refusal:
            raise Err(str(refusal)) from None

    return call


Control = _class(_CONTROL, _refusing)
for _interface in _OTHERS:
    globals()[type(_interface).__name__] = _class(_interface, _plain)
