"""TLS with certificates of a private authority, made on the spot by openssl."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from bagent.backends.http.client import Transport, connection_idle
from support.backend_calls import QUICK, ask, endpoint, failure, raw_server, reply, send
from support.fake_server import FakeServer
from support.replies import status
from support.tls import site_authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "id=r1"}], "max_tokens": 8}'


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A private authority, and a server's certificate that it signed for 127.0.0.1."""
    return site_authority(tmp_path_factory.mktemp("certificates"), "IP:127.0.0.1")


@pytest.fixture
def secure(site):
    """A server that speaks TLS."""
    with FakeServer(ssl_context=site.context) as server:
        yield server


async def test_a_kept_connection_with_tls_tells_how_long_it_was_idle(secure, site):
    to = endpoint(secure.url, ca_file=str(site.ca_file))

    transport = Transport()
    seen = []
    for _ in range(3):
        async with transport.post(to, "/chat/completions", BODY, QUICK) as answer:
            await answer.read()
        seen.append(connection_idle())
    await transport.close()
    assert seen[0] is None
    assert all(0 < idle < 60 for idle in seen[1:])


def test_neither_a_redirect_nor_a_proxy_of_the_environment_gets_the_key(secure, site, monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    secure.set_script({"r1": [status(308, headers={"Location": f"{secure.url}/elsewhere"})]})
    found = failure(ask(endpoint(secure.url, ca_file=str(site.ca_file))))
    assert (found.kind, found.status) == ("rejected", 308)
    assert len(secure.requests) + len(secure.probes) == 1


def test_an_unknown_authority_is_a_lasting_failure_that_says_what_to_do(secure):
    found = failure(ask(secure.url))
    assert (found.kind, found.passing) == ("connect", False)
    assert "certificate not trusted" in found.message
    assert "unable to get local issuer certificate" in found.message
    assert "ca_file" in found.message
    assert "SSL_CERT_FILE" in found.message
    assert secure.requests == []


def test_a_certificate_for_another_host_is_not_trusted(secure, site):
    url = secure.url.replace("127.0.0.1", "localhost")
    found = failure(ask(endpoint(url, ca_file=str(site.ca_file))))
    assert (found.kind, found.passing) == ("connect", False)
    assert "localhost" in found.message


def test_https_to_a_server_that_speaks_http_says_so(fs):
    found = failure(ask(fs.url.replace("http://", "https://")))
    assert (found.kind, found.passing) == ("connect", False)
    assert "no TLS with here" in found.message
    assert "plain http" in found.message


async def test_tls_works_through_a_tunnel(secure, site):
    async def pump(source, sink):
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def tunnel(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", secure.port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        finally:
            inner_writer.close()

    async with raw_server(tunnel) as port:
        proxy = f"http://127.0.0.1:{port}"
        exchange = await send(endpoint(secure.url, ca_file=str(site.ca_file), proxy=proxy))
    assert reply(exchange).text
    assert len(secure.requests) == 1
