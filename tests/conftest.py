"""Fixtures that every test may use, and what is shown of the real parts when a test fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import server as servers
from tests.harness.node import REPOSITORY
from tests.harness.s3 import ObjectServer, S3Server
from tests.harness.server import Home, shared_folder
from tests.harness.user import User

pytest_plugins = ("pytest_jupyter.jupyter_server",)

#: Screenshots and logs of failed tests.
EVIDENCE = REPOSITORY / "build" / "test-evidence"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that nodes can share: not below a folder that a node has of its own."""
    with shared_folder("shared") as path:
        yield path


@pytest.fixture
def home(shared: Path) -> Home:
    """root's own home for one test, with its notebooks and store."""
    return Home(shared / "home")


@pytest.fixture
def user() -> User:
    """An ordinary user of this machine."""
    return User()


@pytest.fixture
def users_home(shared: Path, user: User) -> Home:
    """The ordinary user's own home for one test."""
    return Home(shared / "users-home", user)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server on this machine; tests make buckets of their own."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[ObjectServer]:
    from tests.harness.gcs import GcsServer

    server = GcsServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[ObjectServer]:
    from tests.harness.azure import AzureServer

    server = AzureServer()
    yield server
    server.stop()


@pytest.fixture
def system(request: pytest.FixtureRequest) -> ObjectServer:
    """The server of a test: of S3, unless the test says otherwise."""
    server: ObjectServer = request.getfixturevalue(f"{getattr(request, 'param', 's3')}_server")
    return server


@pytest.fixture(scope="session")
def r_kernelspec() -> Callable[[Home], str]:
    """Install Debian's R kernel into a home; returns the function that does it."""
    source = Path("/usr/lib/R/site-library/IRkernel/kernelspec")
    assert source.is_dir(), "R's kernel is missing: apt-get install r-cran-irkernel"

    def install(home: Home) -> str:
        shutil.copytree(source, home.data / "kernels" / "ir")
        home.own()
        return "ir"

    return install


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.failed:
        for server in servers.RUNNING:
            report.sections.append((f"server log ({server.log_path.name})", server.log()))
            for log in (server.home.data / "gpu-ckpt" / "logs").glob("*.log"):
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                if tail:
                    report.sections.append((f"kernel log ({log.name})", tail))
        for page in getattr(item, "open_pages", []):
            if page.page.is_closed():
                continue
            shot = page.screenshot(EVIDENCE, f"{item.nodeid}-{report.when}")
            report.sections.append(("browser console", "\n".join(page.console[-50:])))
            report.sections.append(("screenshot", str(shot)))
    return report
