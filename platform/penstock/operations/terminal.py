"""What the command line needs of the terminal's settings."""

import locale
import os


def terminal_language() -> str:
    """`zh-hant` for a terminal set to any Chinese, `en` for all others; `PENSTOCK_LANGUAGE` decides if given."""
    chosen = os.environ.get("PENSTOCK_LANGUAGE")
    if not chosen:
        chosen = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    if not chosen:
        chosen = locale.getlocale()[0] or ""
    return "zh-hant" if chosen.lower().startswith("zh") else "en"
