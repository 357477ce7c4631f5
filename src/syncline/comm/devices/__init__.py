"""Linear-pipeline collectives between GPUs of one host, ordered by events alone."""

from syncline.comm.devices.cuda import CudaDevice
from syncline.comm.devices.device_group import DeviceGroup

__all__ = ["CudaDevice", "DeviceGroup"]
