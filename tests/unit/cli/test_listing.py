from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from toka_async.cli.listing import toml_lines
from toka_async.config import Config, load_config

TEXT = st.text(st.characters(exclude_characters="\x00", codec="utf-8"), max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(template=TEXT, host=TEXT, prefix=st.booleans(), timeout=st.floats(0, 10**6), end=st.floats(0.1, 1))
def test_nothing_is_lost(tmp_path: Path, template: str, host: str, prefix: bool, timeout: float, end: float) -> None:
    config = Config()
    config = replace(
        config,
        model=replace(config.model, chat_template=template),
        server=replace(config.server, host=host, drain_timeout=timeout),
        cache=replace(config.cache, prefix=prefix, memory_fraction=end),
    )
    path = tmp_path / "config.toml"
    path.write_text("\n".join(toml_lines(config, config)), encoding="utf-8", newline="\n")
    assert load_config(path) == config


def test_what_was_automatic_is_marked() -> None:
    config = Config()
    lines = list(toml_lines(config, replace(config, schedule=replace(config.schedule, max_seqs=256))))
    assert [line.split() for line in lines if line.endswith("  # auto")] == [["max_seqs", "=", "256", "#", "auto"]]
    assert lines[0].startswith("# The configuration in effect. Marked")
    assert "# auto" not in "\n".join(toml_lines(config, config))
