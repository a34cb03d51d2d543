"""The page of `/admin/ui`: it holds no data, and asks the admin API for everything."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from aiohttp import web

_PAGE = files(__name__).joinpath("page.html").read_text("utf-8")


def _hashes(tag: str) -> str:
    """What a content policy calls the inline contents of these elements."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in contents)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


_HEADERS = {
    # Names of models and requests are others' words: nothing but this page's own code may run.
    "content-security-policy": (
        f"default-src 'none'; connect-src 'self'; script-src {_hashes('script')}; "
        f"style-src {_hashes('style')}; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
}


async def page(_request: web.Request) -> web.Response:
    """The page."""
    return web.Response(text=_PAGE, content_type="text/html", headers=_HEADERS)
