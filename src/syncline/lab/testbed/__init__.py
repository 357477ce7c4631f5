"""An emulated cluster on one machine: hosts that are namespaces, links that are shaped."""

from syncline.lab.testbed.cluster import Cluster
from syncline.lab.testbed.control import Completed, Place, Process, absent_because
from syncline.lab.testbed.job import JobResult, WorkerEnd
from syncline.lab.testbed.testbed import Testbed, Traffic

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
