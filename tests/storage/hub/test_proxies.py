"""The way to a Hub through what the environment names as a proxy, and addresses that are none."""

import http.client
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from checkpoints import write_llama
from hub_cases import NVFP4, ask

PASSWORD = "p@ss"  # %40 in an address
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on whose target is a whole address, where the password is right."""

    protocol_version = "HTTP/1.1"
    passed: list[str]
    password: str | None = None

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        _, _, host, path = self.path.split("/", 3)
        wanted = self.password and f"Basic {b64encode(self.password.encode()).decode()}"
        if self.headers.get("Proxy-Authorization") != wanted:
            return self.reply(407, [("Content-Length", "0")], b"")
        self.passed.append(self.path)
        behind = http.client.HTTPConnection(host)
        headers = {k: v for k, v in self.headers.items() if k != "Proxy-Authorization"}
        behind.request(self.command, f"/{path}", headers=headers)
        reply = behind.getresponse()
        return self.reply(reply.status, reply.getheaders(), reply.read())

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)


@pytest.fixture
def proxy(hub, tmp_path, monkeypatch):
    """A proxy, and the Hub behind it; every test names the proxy in its own way."""
    for name in (*NAMES, *map(str.upper, NAMES)):
        monkeypatch.delenv(name, raising=False)
    hub.add("org/m", write_llama(tmp_path / "m"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Proxy,), {"passed": []}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def passed(proxy, hub, tmp_path) -> tuple[int, int]:
    """(requests that went through the proxy, requests that the Hub and its storage saw) while a
    repository is converted.
    """
    from huggingface_hub import close_session

    close_session()  # it remembers the proxy of the test before
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q").code == 0
    close_session()
    return len(proxy.RequestHandlerClass.passed), len(hub.seen)


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}", "http://127.0.0.1:{}/"])
@pytest.mark.sweep(3)
def test_every_request_takes_the_way_that_is_named(name, form, proxy, hub, tmp_path, monkeypatch):
    monkeypatch.setenv(name, form.format(proxy.server_address[1]))
    through, seen = passed(proxy, hub, tmp_path)
    assert through == seen > 10


def test_no_proxy_is_the_direct_way(proxy, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert passed(proxy, hub, tmp_path)[0] == 0


def test_a_proxy_gets_the_password_that_its_address_holds(proxy, hub, tmp_path, monkeypatch):
    proxy.RequestHandlerClass.password = f"me:{PASSWORD}"
    place = f"127.0.0.1:{proxy.server_address[1]}"
    monkeypatch.setenv("http_proxy", f"http://me:{PASSWORD.replace('@', '%40')}@{place}")
    through, seen = passed(proxy, hub, tmp_path)
    assert through == seen > 10


@pytest.mark.parametrize(
    "address",
    ["socks5://127.0.0.1:1080", "http://host:abc", "http://[", f"ftp://me:{PASSWORD}@127.0.0.1"],
)
def test_a_proxy_that_cannot_be_used_is_an_error_at_once(address, proxy, tmp_path, monkeypatch):
    monkeypatch.setenv("all_proxy", address)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "proxy")
    assert PASSWORD not in outcome.out + outcome.err


@pytest.mark.parametrize(
    "endpoint",
    ["", "ftp://127.0.0.1", "127.0.0.1:80", "https://", "http://127.0.0.1:99999", "https://["],
)
def test_an_endpoint_that_is_no_address(endpoint, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    outcome = ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "endpoint")


@pytest.mark.parametrize("token", ["", " "])
def test_a_token_of_nothing_is_none(token, hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    hub.add("org/m", write_llama(tmp_path / "m"))
    assert ask("quantize", "org/m", *NVFP4, "-o", tmp_path / "q", "--token", token).code == 0
    words = ("-o", tmp_path / "p", "--token", token, "--push-to-hub", "me/q")
    pushed = ask("quantize", tmp_path / "m", *NVFP4, *words)
    assert (pushed.code, pushed.json["error"]["code"]) == (4, "no-token")
