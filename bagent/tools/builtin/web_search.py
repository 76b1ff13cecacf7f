"""``web_search``: Brave Search or SerpAPI, by a key from the environment.

Sources: https://api-dashboard.search.brave.com/app/documentation and
https://serpapi.com/search-api.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import aiohttp

from bagent.backends.keys import key_from_env
from bagent.errors import UsageError
from bagent.text.json import decode_json
from bagent.tools.truncate import shorten
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

Service = Literal["brave", "serpapi"]

ADDRESSES: Mapping[Service, str] = {
    "brave": "https://api.search.brave.com/res/v1/web/search",
    "serpapi": "https://serpapi.com/search.json",
}
KEYS: Mapping[Service, tuple[str, ...]] = {
    "brave": ("BRAVE_API_KEY", "BRAVE_SEARCH_API_KEY"),
    "serpapi": ("SERPAPI_API_KEY", "SERPAPI_KEY", "SERP_API_KEY"),
}

MOST_BYTES = 4 << 20
MOST_RESULTS = 20

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1, "description": "What to look for."},
        "count": {
            "type": "integer",
            "minimum": 1,
            "maximum": MOST_RESULTS,
            "description": "How many results; default: 10.",
        },
    },
    "required": ["query"],
    "additionalProperties": False,
}
DESCRIPTION = "Search the web: titles, addresses and short texts of pages."


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """The service, its URL and its key."""

    service: Service
    url: str
    key: str

    def __repr__(self) -> str:
        return f"SearchConfig({self.service}, {self.url})"


def search_config(url: str | None, key_env: str | None, env: Mapping[str, str]) -> SearchConfig:
    """Choose the service by its URL, by the name of the key variable, or by the key that is set.

    Raises:
        UsageError: there is no key.
    """
    service = _service(url, key_env, env)
    names = (key_env,) if key_env else KEYS[service]
    key = next((key for name in names if (key := key_from_env(env, name))), None)
    if key is None:
        variables = key_env or " or ".join((KEYS["brave"][0], KEYS["serpapi"][0]))
        raise UsageError(
            f"web_search has no key: {variables} is not set", hint=f"export {names[0]}="
        )
    return SearchConfig(service, url or ADDRESSES[service], key)


def search_target(url: str | None, key_env: str | None, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable of the key, and the URL that the key is sent to."""
    service = _service(url, key_env, env)
    names = (key_env,) if key_env else KEYS[service]
    return next((name for name in names if env.get(name)), names[0]), url or ADDRESSES[service]


def _service(url: str | None, key_env: str | None, env: Mapping[str, str]) -> Service:
    text = f"{url or ''} {key_env or ''}".lower()
    if "brave" in text:
        return "brave"
    if "serp" in text or (url or "").partition("?")[0].endswith("search.json"):
        return "serpapi"
    has_serpapi = any(env.get(name) for name in KEYS["serpapi"])
    has_brave = any(env.get(name) for name in KEYS["brave"])
    return "serpapi" if has_serpapi and not has_brave and not key_env else "brave"


class WebSearch:
    """Searches by one service, at the URL of the job or the service's own."""

    def __init__(self, config: SearchConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def run(self, arguments: Arguments) -> str:
        """Return numbered results: title, URL, text.

        Raises:
            ToolFault: the service cannot be reached or refuses; the message never has its key.
        """
        config = self._config
        count = str(arguments.get("count", 10))
        query = {"q": arguments["query"]}
        headers: dict[str, str] = {"Accept": "application/json"}
        if config.service == "brave":
            query["count"] = count
            headers["X-Subscription-Token"] = config.key
        else:
            query |= {"engine": "google", "num": count, "api_key": config.key}
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(trust_env=True, timeout=timeout)
        try:
            async with self._session.get(
                config.url, params=query, headers=headers, allow_redirects=False
            ) as response:
                body = await response.content.read(MOST_BYTES)
                while piece := await response.content.read(MOST_BYTES - len(body)):
                    body += piece
                status = response.status
        except aiohttp.ClientConnectorError as error:
            raise ToolFault(
                f"the search service: {error.os_error.strerror or 'no answer'}"
            ) from None
        except aiohttp.ClientError as error:
            raise ToolFault(f"the search service: {type(error).__name__}") from None
        return self._format(status, body, int(count))

    def _format(self, status: int, body: bytes, count: int) -> str:
        excerpt = body[:300].decode("utf-8", "replace").replace(self._config.key, "***")
        try:
            answer = decode_json(body)
        except ValueError:
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise ToolFault(f"the search service answers {status}: {excerpt}")
        if self._config.service == "brave":
            web = answer.get("web")
            results, link, text_key = (web or {}).get("results"), "url", "description"
        else:
            results, link, text_key = answer.get("organic_results"), "link", "snippet"
        lines = [
            f"{number}. {result.get('title', '')}\n{result.get(link, '')}\n"
            f"{result.get(text_key) or ''}".rstrip()
            for number, result in enumerate((results or [])[:count], 1)
            if isinstance(result, dict)
        ]
        if not lines and answer.get("error"):
            return f"[nothing found: {shorten(str(answer['error']), 200)}]"
        return "\n\n".join(lines) or "[nothing found]"
