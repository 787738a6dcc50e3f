"""Notices from clouds: each asks the metadata service of its machine, over HTTP.

Nothing leaves a machine that its firmware does not call one of that cloud's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from traitlets import Float, List, Unicode

from ..moments import read_moment
from .source import Notice, NoticeSource

#: What the machine's firmware says of it.
DMI: Final = Path("/sys/class/dmi/id")

#: Seconds after which a service that does not answer is asked again, at most.
_LONGEST_PAUSE: Final = 10.0
#: Most bytes of an answer.
_LARGEST: Final = 1 << 20


class Unavailable(Exception):
    """The metadata service did not answer, or not as it should."""


class Answer(NamedTuple):
    """What a metadata service said."""

    status: int
    text: str
    headers: Mapping[str, str]


class MetadataNotice(NoticeSource):
    """Asks a metadata service again and again; base of the clouds' sources."""

    address = Unicode(
        "http://169.254.169.254",
        config=True,
        help="Address of the cloud's metadata service, without a path.",
    )
    poll = Float(
        5.0,
        min=0.05,
        max=3600.0,
        config=True,
        help="Seconds between two questions to the metadata service. Default 5.",
    )
    timeout = Float(
        5.0,
        min=0.1,
        max=600.0,
        config=True,
        help="Seconds after which an answer has not come. Default 5.",
    )

    async def notices(self) -> AsyncIterator[Notice]:
        """What :meth:`look` finds; one that is there again is not given again."""
        self._client = SimpleAsyncHTTPClient(force_instance=True, max_body_size=_LARGEST)
        told: set[str] = set()
        pause = self.poll
        try:
            while True:
                try:
                    for key, notice in await self.look():
                        if key not in told:
                            told.add(key)
                            yield notice
                    pause = self.poll
                except Unavailable as error:
                    self.log.debug("The metadata service: %s", error)
                    pause = min(2 * pause, max(self.poll, _LONGEST_PAUSE))
                await asyncio.sleep(pause)
        finally:
            self._client.close()

    async def look(self) -> list[tuple[str, Notice]]:
        """Ask once: the notices that there are, each with what tells it from others.

        Raises
        ------
        Unavailable
            When the service does not answer.
        """
        raise NotImplementedError

    async def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        timeout: float | None = None,
    ) -> Answer:
        """Send one request; :class:`Unavailable` unless it is answered with 200 or 404."""
        request = HTTPRequest(
            self.address.rstrip("/") + path,
            method=method,
            headers=dict(headers),
            body="" if method == "PUT" else None,
            connect_timeout=self.timeout,
            request_timeout=timeout or self.timeout,
            follow_redirects=False,
        )
        try:
            response = await self._client.fetch(request, raise_error=False)
            text = response.body.decode() if response.body else ""
        except (HTTPClientError, OSError, ValueError) as error:
            raise Unavailable(f"{path}: {error}") from error
        if response.code not in (200, 404):
            raise Unavailable(f"{path}: {response.code}")
        return Answer(response.code, text, response.headers)


def firmware(name: str) -> str:
    """One of the words that the firmware has for this machine; empty where it has none."""
    try:
        return (DMI / name).read_text(errors="replace").strip()
    except OSError:
        return ""


class AwsNotice(MetadataNotice):
    """AWS EC2: the interruption of a spot instance, and the advice to leave one."""

    rebalance_seconds = Float(
        120.0,
        min=0.0,
        max=3600.0,
        config=True,
        help="Seconds within which kernels are saved when AWS recommends to leave the instance "
        "(rebalance recommendation): an interruption may follow, at any time. 0: that is no "
        "notice. Default 120.",
    )

    _token = ""
    _token_until = 0.0

    def applies(self) -> bool:
        """On EC2."""
        is_nitro = "Amazon EC2" in (firmware("sys_vendor"), firmware("bios_vendor"))
        return is_nitro or firmware("bios_version").endswith("amazon")

    async def look(self) -> list[tuple[str, Notice]]:
        """The instance's action, and the recommendation; AWS sets the one two minutes ahead."""
        found = []
        said = await self._get("/latest/meta-data/spot/instance-action")
        if said is not None:
            action, when = said.get("action"), said.get("time")
            seconds = max(0.0, _seconds_until(str(when)))
            why = f"AWS takes the instance back ({action})."
            found.append((f"action {when}", Notice(seconds, why)))
        if self.rebalance_seconds > 0:
            said = await self._get("/latest/meta-data/events/recommendations/rebalance")
            if said is not None:
                why = "AWS may soon take the instance back (rebalance recommendation)."
                notice = Notice(self.rebalance_seconds, why, sure=False)
                found.append((f"rebalance {said.get('noticeTime')}", notice))
        return found

    async def _get(self, path: str) -> dict[str, Any] | None:
        """What a path says; ``None`` where AWS has nothing to say."""
        if time.monotonic() >= self._token_until:
            # 21600 s is the longest that a token may live.
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            answer = await self.ask("/latest/api/token", headers, method="PUT")
            self._token = answer.text if answer.status == 200 else ""
            self._token_until = time.monotonic() + 20000
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        try:
            answer = await self.ask(path, headers)
        except Unavailable:
            self._token_until = 0.0  # the token may have been what it did not like
            raise
        return _object(answer.text) if answer.status == 200 else None


class GcpNotice(MetadataNotice):
    """Google Cloud: the preemption of an instance."""

    address = Unicode(
        "http://169.254.169.254",
        config=True,
        help="Address of the metadata service, without a path; metadata.google.internal.",
    )
    poll = Float(
        1.0,
        min=0.05,
        max=3600.0,
        config=True,
        help="Seconds between two questions to the metadata service. Each waits for up to a minute "
        "for something to happen. Default 1.",
    )
    seconds = Float(
        30.0,
        min=0.0,
        max=3600.0,
        config=True,
        help="Seconds that are left when an instance is preempted; Google gives 30.",
    )

    _etag = "0"

    def applies(self) -> bool:
        """On Google Compute Engine."""
        return firmware("product_name") == "Google Compute Engine"

    async def look(self) -> list[tuple[str, Notice]]:
        """Whether the instance is preempted, as soon as that changes."""
        path = "/computeMetadata/v1/instance/preempted"
        query = f"?wait_for_change=true&timeout_sec=60&last_etag={self._etag}"
        headers = {"Metadata-Flavor": "Google"}
        answer = await self.ask(path + query, headers, timeout=60 + self.timeout)
        self._etag = answer.headers.get("ETag", "0")
        if answer.status != 200 or answer.text.strip().upper() != "TRUE":
            return []
        return [("preempted", Notice(self.seconds, "Google Cloud preempts the instance."))]


class AzureNotice(MetadataNotice):
    """Azure: scheduled events of this virtual machine."""

    poll = Float(
        1.0,
        min=0.05,
        max=3600.0,
        config=True,
        help="Seconds between two questions to the metadata service. Default 1, which Azure "
        "recommends.",
    )
    events = List(
        Unicode(),
        ["Preempt", "Terminate", "Reboot", "Redeploy"],
        config=True,
        help="Types of scheduled events that end what runs on the machine.",
    )

    _name: str | None = None

    def applies(self) -> bool:
        """On Azure: its machines carry this number, other Hyper-V machines do not."""
        return firmware("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77"

    async def look(self) -> list[tuple[str, Notice]]:
        """The events that are scheduled; those of neighbours are among the answers."""
        headers = {"Metadata": "true"}
        if self._name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            answer = await self.ask(path, headers)
            self._name = answer.text.strip() if answer.status == 200 else ""
        answer = await self.ask("/metadata/scheduledevents?api-version=2020-07-01", headers)
        if answer.status != 200:
            return []
        events = _object(answer.text).get("Events")
        found = []
        for event in events if isinstance(events, list) else []:
            if not isinstance(event, dict) or event.get("EventType") not in self.events:
                continue
            resources = event.get("Resources")
            if self._name and isinstance(resources, list) and self._name not in resources:
                continue
            # Empty once it has begun.
            seconds = _seconds_until(str(event.get("NotBefore") or ""))
            why = f"Azure ends what runs on the machine ({event['EventType']})."
            found.append((str(event.get("EventId")), Notice(max(0.0, seconds), why)))
        return found


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise Unavailable(f"no JSON: {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise Unavailable(f"no object: {text[:80]!r}")
    return found


def _seconds_until(when: str) -> float:
    """Seconds until a time as clouds write it (ISO 8601, RFC 2822); 0 where it says nothing."""
    try:
        moment = read_moment(when)
    except ValueError:
        try:
            moment = parsedate_to_datetime(when)
        except (TypeError, ValueError, IndexError):
            return 0.0
    return moment.timestamp() - time.time() if moment.tzinfo else 0.0
