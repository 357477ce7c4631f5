"""``Request``: what ``syncline run`` and ``syncline advise`` ask of a script's processes."""

from __future__ import annotations

import os

import msgspec

from syncline.errors import UserError
from syncline.plan.recipe import Compression
from syncline.torch_entry import LAUNCHED

OFF = "SYNCLINE"  # the environment variable that disables both commands if it is 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; an environment variable holds it as JSON."""

    advises: bool = False  # only observe, and advise
    planner: str = "auto"
    check: bool = True
    compression: Compression | None = None
    cache: bool | str = True
    compile_blocks: bool = False
    """Compile the blocks of a model that the script compiles as a whole."""
    report: str | None = None  # the folder of the report that rank 0 writes at the end
    folder: str = ""  # the folder for the advice and the data behind it
    seconds: float = 60.0  # how long to observe at most
    goes_on: bool = False  # continue training after the advice
    json: bool = False

    def to_variable(self) -> dict[str, str]:
        """Return the environment variable that passes the request to a script's processes."""
        return {LAUNCHED: msgspec.json.encode(self).decode()}

    @classmethod
    def of_this_process(cls) -> Request | None:
        """Return the request, None if switched off; raise UserError if the variable is invalid."""
        if os.environ.get(OFF) == "0":
            return None
        try:
            return msgspec.json.decode(os.environ[LAUNCHED], type=cls)
        except msgspec.DecodeError as error:
            raise UserError(f"{LAUNCHED} is set by 'syncline run' alone; found: {error}") from None
