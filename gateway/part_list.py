"""The list of parts: a feature is a folder in `gateway/parts/` and a line here (docs/adding-a-part.md)."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config.part_keys import config_of
from gateway.core.part import Part
from gateway.parts.answers.answer_cache import AnswerCache
from gateway.parts.caller_keys.caller_keys import CallerKeys
from gateway.parts.comments.stream_comments import Comments
from gateway.parts.counts.count_replies import CountReplies
from gateway.parts.discovery.part import DiscoveryPart
from gateway.parts.escalation.answer_quality import Escalations
from gateway.parts.keys.part import KeysPart
from gateway.parts.kv_events.part import KvEventsPart
from gateway.parts.learned.part import LearnedPart
from gateway.parts.lessons.part import LessonsPart
from gateway.parts.origins.part import Origins
from gateway.parts.picker.part import PickerPart
from gateway.parts.prefix_doctor.part import PrefixDoctorPart
from gateway.parts.quotas.quotas import Admission
from gateway.parts.records.part import RecordsPart
from gateway.parts.repair.prompt_repairs import Repairs
from gateway.parts.replicas.part import ReplicasPart
from gateway.parts.rescue.rescue import Rescues
from gateway.parts.responses.kept_state import KeptState
from gateway.parts.responses.responses_sockets import ResponsesSockets
from gateway.parts.responses.stored_responses import StoredPaths
from gateway.parts.tags.tags import Tags
from gateway.parts.telemetry.part import TelemetryPart
from gateway.parts.warming.part import CacheWarming
from gateway.parts.windows.part import WindowsPart
from gateway.parts.witness.part import WitnessPart
from gateway.parts.workers.part import WorkersPart
from gateway.wiring import Core

PARTS: tuple[Callable[[Core], Part], ...] = (  # in order of start and of hooks
    PrefixDoctorPart,
    RecordsPart,
    TelemetryPart,
    WorkersPart,
    ReplicasPart,
    KeysPart,
    KvEventsPart,
    Tags,
    Admission,
    Repairs,
    KeptState,
    CallerKeys,
    Origins,
    Comments,
    CountReplies,
    AnswerCache,
    LessonsPart,
    lambda core: Rescues(core.fleet, core.dispatcher.run),
    lambda core: Escalations(core.runtime.current),
    StoredPaths,
    ResponsesSockets,
    CacheWarming,
    WitnessPart,
    WindowsPart,
    DiscoveryPart,  # reloads at its start, where endpoints are to be found
    LearnedPart,  # restores what belongs to the endpoints found
    PickerPart,
)

COLUMNS = [column for part in PARTS for column in getattr(part, "columns", ())]  # of the Record
CONFIG = config_of(PARTS)  # to load a file with the keys of all parts
