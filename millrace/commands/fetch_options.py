"""What ``millrace data fetch`` can be told. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path

from millrace.config import one_of
from millrace.data.catalog import CATALOG


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Download a data set, check it and unpack it.

    The files go to the folder NAME in the data folder, where the applications look when
    --dataset-path has no such data set. A download that broke off goes on where it stopped.
    """

    name: str = field(metadata={"positional": True})
    """Data set: mnist, fashion-mnist, binarized-mnist, cifar10 or cifar100."""
    data_dir: Path | None = None
    """The data folder (default: the environment's MILLRACE_DATA, or ~/.cache/millrace)."""
    url: str | None = None
    """Folder to download from instead of the publisher's, such as a mirror."""
    quiet: bool = False
    """Print nothing but errors."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        known = one_of("NAME", self.name, CATALOG)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url must start with http:// or https://, got {self.url}.")
        if not known.files:
            raise ValueError(f"{self.name} comes with scikit-learn: nothing to fetch.")
        if known.url is None and self.url is None:
            files = " and ".join(file.name for file in known.files)
            raise ValueError(
                f"{self.name} cannot be fetched without registering. Download {files} from "
                f"{known.website}, unpack them, and give the folder to --dataset-path; or "
                "give the URL of a mirror's folder with --url."
            )
