"""JSON that can be passed on as it is: every number finite, every text Unicode.

Python reads more than the standard knows - NaN, numbers beyond a float, half of a surrogate pair - and cannot write
it again. So what comes from outside is read here, and refused at once where it could not go on.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

# What may stand for a number beyond a float, or for half a surrogate pair: rare, and looked at closely.
_ODD = re.compile(r"[eE]\+?\d{3}|\d{309}|\\u[dD][89a-fA-F]")


def read_json(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, which says what is wrong, for one that could not be passed on."""
    text = data.decode(json.detect_encoding(data))
    try:
        value = json.loads(text, parse_constant=_no_number)
        if _ODD.search(text):
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a text in it holds half of a surrogate pair, which no encoding can carry") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError("a number in it is not finite, or has too many digits") from error
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)
