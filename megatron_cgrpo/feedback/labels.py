"""What a critique concludes."""

from __future__ import annotations

import re

END = "[END]"
_CONCLUSION = re.compile(
    r"^[ \t*_#>]{0,12}Conclusion:[ \t*_]{0,12}(correct|wrong)[ \t*_.]{0,12}\[END\][ \t*_]{0,12}$",
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
