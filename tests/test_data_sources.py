"""Names and `source` values, before anything is decoded."""

import subprocess
import sys
from pathlib import Path

import pytest
from data_fixtures import rejected

from data import sources
from data.readers import READERS
from protocol.source_spec import SOURCE_NAMES


def test_every_source_name_has_a_reader():
    assert tuple(READERS) == SOURCE_NAMES


@pytest.mark.end_to_end
def test_reading_and_describing_sources_does_not_import_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from data.sources import load_source; "
        "import data.partitions; "
        "folders = Path(sys.argv[1]), Path(sys.argv[2]); "
        "load_source('digits', *folders); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data"), str(tmp_path / "cache")]
    root = Path(sources.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("spec", ["imagenet", "folder", "folder:", "digits:/tmp", ""])
def test_an_unknown_source_is_refused_with_the_allowed_names(load, spec):
    assert all(name in rejected(load, spec) for name in SOURCE_NAMES)
