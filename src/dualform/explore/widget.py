"""The explorer in a notebook: the same front end, asking the kernel instead of a server."""

from __future__ import annotations

import threading
from typing import Any

import anywidget
import traitlets

from dualform.errors import DualformError
from dualform.explore.jobs import Jobs, ViewJob
from dualform.explore.page import asset, finite
from dualform.explore.views import Explorer
from dualform.ledger.samples import SampleId


class ExplorerWidget(anywidget.AnyWidget):
    """Shows an exhibit in a notebook; `selection` holds the ids of the samples that were ticked.

    >>> from dualform.explore import Exhibit
    >>> from dualform.testing import tiny_run
    >>> run, model, x = tiny_run()
    >>> ExplorerWidget(Explorer(Exhibit(run, model, x[:2]))).selection
    []
    """

    selection: traitlets.List[Any] = traitlets.List().tag(sync=True)
    state = traitlets.Unicode("").tag(sync=True)
    """What is looked at, as a URL would hold it."""

    @traitlets.validate("selection")
    def _own_ids(self, proposal: Any) -> list[SampleId]:
        """The page knows ids as texts; here they are what the run knows them as."""
        return [self._explorer.run.sample_id(str(name)) for name in proposal["value"]]

    def __init__(self, explorer: Explorer) -> None:
        self._explorer, self._jobs = explorer, Jobs()
        self._asked: dict[Any, ViewJob] = {}
        self._esm, self._css = asset("widget.js"), asset("widget.css")
        super().__init__()
        self.on_msg(self._answer)

    def _answer(self, widget: Any, message: Any, buffers: Any) -> None:
        """Begins what the page asks for, or ends what it no longer waits for."""
        if message.get("cancel"):
            self._leave(message.get("id"))
            return
        number, path = message["id"], str(message["path"])
        parameters = message.get("params", {})
        job = self._jobs.join((number, path), lambda: self._explorer.view(path, parameters))
        self._asked[number] = job
        threading.Thread(target=self._follow, args=(number, job), daemon=True).start()

    def _follow(self, number: Any, job: ViewJob) -> None:
        """Tells the page how far its question is, then the answer."""
        while True:
            try:
                self._tell(number, {"result": finite(job.future.result(timeout=0.2))})
            except TimeoutError:
                self._tell(number, job.news)
                continue
            except (DualformError, OSError) as error:
                self._tell(number, {"error": str(error)})
            self._leave(number)
            return

    def _leave(self, number: Any) -> None:
        """One question less: it was answered, or is no longer waited for."""
        job = self._asked.pop(number, None)
        if job is not None:
            job.leave()

    def _tell(self, number: Any, news: dict[str, Any]) -> None:
        if number in self._asked:
            self.send({"id": number, **news})
