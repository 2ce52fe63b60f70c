"""Imported files through our gateway, beside the groups that the real LiteLLM was seen to answer with.

`make importing` runs both, and writes the table of LiteLLM's answers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from gateway.app import Gateway
from gateway.config.loading import validated
from gateway.config.yaml_source import parse
from tests.support.fake_providers import FakeProviders
from tests.support.gateways import started
from tests.support.import_cases import FilledEnvironment, litellm
from tests.support.litellm_files import FILES, LitellmFile
from tests.support.side_by_side import answered_by, kept, unlike

pytestmark = pytest.mark.virtual_time

SOME = 100  # of the requests that LiteLLM has answered


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.replace(" ", "-"))
async def test_an_imported_file_answers_as_litellm_does(file: LitellmFile) -> None:
    """The same group answers each of 100 requests, with failures planted; equals share them."""
    if file.name not in kept():
        pytest.skip("LiteLLM's answers to this file are not in the table yet: make importing")
    async with FakeProviders(file.providers, file.faults) as providers:
        written = yaml.safe_load(litellm(file.written(providers.ports)).text())
        written |= {"server": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}, "telemetry": {"access_log": "off"}}
        config = validated(parse(yaml.safe_dump(written), "imported.yaml", FilledEnvironment()))
        async with started(Gateway(config)) as gateway:
            in_turn = replace(file, concurrent=1)  # planted failures of several at once would come in a row
            answers = await answered_by(f"{gateway.url}/v1", in_turn, SOME)
    assert unlike(file, kept()[file.name][:SOME], answers) == []
