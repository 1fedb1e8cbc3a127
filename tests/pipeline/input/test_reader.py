"""What a reader's process imports. Jobs test what it reads."""

import subprocess
import sys

from exspec.jobs.demo import TARGET


def test_a_reader_loads_its_tokenizer_without_importing_models() -> None:
    """Models take seconds to import, in each of its processes."""
    code = (
        "import sys; sys.modules['transformers.modeling_utils'] = None; import exspec.pipeline.input.reader as reader;"
        f"print(len(reader.load_part(reader.AutoTokenizer, reader.Source({str(TARGET)!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
