"""An emulated cluster on one machine: hosts that are namespaces, links that are shaped."""

from syncline.testbed.cluster import Cluster
from syncline.testbed.control import absent_because
from syncline.testbed.place import Place
from syncline.testbed.process import Completed, Process
from syncline.testbed.result import JobResult, WorkerEnd
from syncline.testbed.testbed import Testbed, Traffic

__all__ = [
    "Cluster",
    "Completed",
    "JobResult",
    "Place",
    "Process",
    "Testbed",
    "Traffic",
    "WorkerEnd",
    "absent_because",
]
