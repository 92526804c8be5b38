"""What the test process and its workers say to each other, and what became of a call on one rank.

Messages travel as plain pickles: tensors by value, functions by module and qualified name.
"""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Call:
    """Ask a worker to call `qualname` of `module`. `arguments` is a pickled tuple."""

    module: str
    qualname: str
    arguments: bytes

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True)
class Renew:
    """Ask a worker to replace its default process group by a fresh one."""


@dataclass(frozen=True)
class Returned:
    """The function returned on this rank, or its process group is ready. `value` is a pickle."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """The function raised on this rank. `error` is a pickle, or None with `unpicklable` saying why not."""

    summary: str
    traceback: str
    error: bytes | None
    unpicklable: str = ""


@dataclass(frozen=True)
class Stuck:
    """The rank had not answered when its time was over. `stack`: where its threads were."""

    seconds: float
    stack: str


@dataclass(frozen=True)
class Died:
    """The worker process ended instead of answering. `stack` is empty unless it died of a fatal signal."""

    exit_code: int | None
    stack: str


Outcome = Returned | Raised | Stuck | Died


def send(connection: Connection, message: Call | Renew | Returned | Raised) -> None:
    # Connection.send would use the pickler of multiprocessing, which hands tensors over in shared memory.
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> object:
    message: object = pickle.loads(connection.recv_bytes())
    return message
