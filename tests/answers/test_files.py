import http.server
import json
import socket
import threading
from pathlib import Path

import pytest

from bagent.answers.schema.schema import OutputSchema
from bagent.errors import SchemaError

STRING = {"type": "string"}


@pytest.fixture
def folder(tmp_path):
    """A folder of schema files; call it with name=value pairs to fill it."""

    def write(files):
        for name, value in files.items():
            path = tmp_path / "schemas" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path / "schemas"

    return write


def load(base):
    return OutputSchema.load(Path("root.json"), base=base)


def failing(base):
    with pytest.raises(SchemaError) as caught:
        load(base)
    return str(caught.value)


@pytest.mark.parametrize(
    "reference",
    [
        "../secret.json",
        "../secret.json#/$defs/p",
        "sub/../../secret.json",
        "..%2Fsecret.json",
        "%2e%2e/secret.json",
        "./../schemas/../secret.json",
        "/etc/hostname",
        "//host/secret.json",
        "file:///etc/hostname",
        "file:secret.json",
        "FILE:///etc/hostname",
        "ftp://127.0.0.1/x",
        "data:application/json,{}",
        "urn:example:x",
        "C:\\secret.json",
        "..\\secret.json",
        "root.json?x",
        "x\x00.json",
        "link.json",
        "away/secret.json",
        "..",
    ],
)
def test_nothing_outside_the_folder_is_read(folder, tmp_path, reference):
    base = folder({"root.json": {"properties": {"a": {"$ref": reference}}}})
    (tmp_path / "secret.json").write_text("not json: this would be told if it were read")
    (base / "link.json").symlink_to(tmp_path / "secret.json")
    (base / "away").symlink_to(tmp_path)
    message = failing(base)
    assert "#/properties/a/$ref" in message
    assert "not JSON" not in message and "not there" not in message


def test_links_inside_the_folder_are_fine(folder):
    base = folder({"root.json": {"$ref": "link.json"}, "real.json": STRING})
    (base / "link.json").symlink_to(base / "real.json")
    assert not load(base).accepts(1)


def test_schema_file_of_the_user_may_be_a_link_to_anywhere(folder, tmp_path):
    base = folder({"common.json": STRING})
    (tmp_path / "elsewhere.json").write_text('{"$ref": "common.json"}')
    (base / "root.json").symlink_to(tmp_path / "elsewhere.json")
    assert not load(base).accepts(1)


@pytest.mark.parametrize("name", ["loop.json", "x" * 300 + ".json", "root.json/x", "locked"])
def test_unreadable_files_are_one_line_errors(folder, name):
    base = folder({"root.json": {"$ref": name}})
    (base / "loop.json").symlink_to(base / "loop.json")
    (base / "locked").mkdir()
    assert "#/$ref" in failing(base)


@pytest.mark.parametrize("key", ["$ref", "$dynamicRef", "$schema", "$id"])
def test_the_network_is_never_asked(folder, key):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/s.json"
    with listener:
        for spec in ({key: url}, {"properties": {"a": {key: url, "$ref": "x.json"}}}):
            base = folder({"root.json": spec, "x.json": {"type": "string"}})
            try:
                schema = OutputSchema.load(Path("root.json"), base=base)
                schema.accepts({"a": 1})
                schema.explain({"a": 1})
            except SchemaError:
                pass
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_remote_references_are_fetched_only_where_allowed(folder):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.path)
            answers = {
                "/s/a.json": {"properties": {"b": {"$ref": "b.json#/$defs/x"}}},
                "/s/b.json": {"$defs": {"x": STRING}},
            }
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, *args):
            pass

    seen = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/s"
        base = folder({"root.json": {"$ref": f"{address}/a.json"}})
        refused = failing(base)
        assert seen == []
        schema = OutputSchema.load(Path("root.json"), base=base, allow_remote=True)
        base = folder({"root.json": {"$ref": f"{address}/no.json"}})
        with pytest.raises(SchemaError, match="404"):
            OutputSchema.load(Path("root.json"), base=base, allow_remote=True)
        server.shutdown()
        thread.join()
    assert "network" in refused
    assert seen == ["/s/a.json", "/s/b.json", "/s/no.json"]
    assert schema.document["$defs"] == {
        "a": {"properties": {"b": {"$ref": "#/$defs/x"}}},
        "x": STRING,
    }
    assert not schema.accepts({"b": 1})
