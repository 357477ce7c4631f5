"""An emulated cluster on one machine: hosts that are namespaces, links that are shaped."""

from syncline.lab.testbed.cluster import Cluster
from syncline.lab.testbed.control import absent_because
from syncline.lab.testbed.testbed import Testbed

__all__ = ["Cluster", "Testbed", "absent_because"]
