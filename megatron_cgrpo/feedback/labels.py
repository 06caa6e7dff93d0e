"""What a critique concludes."""

from __future__ import annotations

import re

END = "[END]"
_CONCLUSION = re.compile(
    r"^[\s*_#>]*Conclusion:[\s*_]*(correct|wrong)[\s*_.]*\[END\][\s*_]*$",
    re.IGNORECASE | re.MULTILINE,
)


def conclusion(text: str, truncated: bool = False) -> bool | None:
    """Whether a critique says "correct"; None when it carries no label.

    Only whole lines `Conclusion: correct [END]` or `Conclusion: wrong [END]` count. Several that
    agree are one; several that contradict each other are none, and so is a critique that was cut.
    """
    found = {m[1].lower() == "correct" for m in _CONCLUSION.finditer(text)}
    if truncated or len(found) != 1:
        return None
    return found.pop()
