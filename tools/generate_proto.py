"""Generate the protobuf and gRPC stubs of `coranto.wire`, or with `--check` report whether they are current."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOT = ROOT / "platform"
WIRE = SOURCE_ROOT / "coranto" / "wire"
# The compiler's package includes the well-known types (google/protobuf/*.proto).
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"


def generate(out: Path) -> None:
    """Write the stubs of every `.proto` file of the wire folder below `out`, in the layout of the source root."""
    # The compiler finds its mypy plugins on PATH. They are installed in this interpreter's folder.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    protos = sorted(WIRE.glob("*.proto"))
    arguments = [
        "protoc",
        f"-I{SOURCE_ROOT}",
        f"-I{WELL_KNOWN}",
        f"--python_out={out}",
        f"--mypy_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_grpc_out={out}",
        *(str(p) for p in protos),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; see its message above")
    # A file without services yields empty gRPC stubs.
    for proto in protos:
        if "\nservice " not in proto.read_text():
            for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
                (out / "coranto" / "wire" / f"{proto.stem}{suffix}").unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs, change nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {p.name: p.read_bytes() for p in (Path(scratch) / "coranto" / "wire").iterdir()}
    present = {p.name: p.read_bytes() for p in WIRE.glob("*_pb2*")}
    if check:
        stale = sorted(n for n in fresh.keys() | present.keys() if fresh.get(n) != present.get(n))
        if stale:
            print(f"stubs are not current: {', '.join(stale)}; run `make proto`", file=sys.stderr)
            return 1
        return 0
    for name in present.keys() - fresh.keys():
        (WIRE / name).unlink()
    for name, content in fresh.items():
        (WIRE / name).write_bytes(content)
    print(f"wrote {len(fresh)} stubs to {WIRE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
